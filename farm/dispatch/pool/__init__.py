"""The devices of a run: found or booted, leased, granted to workers, started again."""
