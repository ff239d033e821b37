"""Numbers compared: interleaved pairs of two programs, suspected regressions, bisect."""
