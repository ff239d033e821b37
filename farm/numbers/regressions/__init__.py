"""Regressions: interleaved pairs, the first bad run, and the likely cause."""
