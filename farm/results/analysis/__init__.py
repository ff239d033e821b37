"""Statistics of many runs: suspected regressions, their first run and the cause of a change. Pure."""
