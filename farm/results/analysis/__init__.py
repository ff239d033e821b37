"""Numbers of many runs: what is a candidate, since which run, and what a change comes from. Statistics, pure."""
