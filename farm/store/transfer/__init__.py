"""Export of runs and import into another store, as lines of untrusted JSON."""
