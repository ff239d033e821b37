"""RawResult -> Attempt: figures, verdict, cause; who is to blame, and whether another device tries it."""
