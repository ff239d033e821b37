"""What got worse: a look back after each run, interleaved A/B, the first bad run, the likely cause."""
