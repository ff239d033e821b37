"""What a run says (`model`), as pages, as lines of a terminal, and for other programs (`formats`)."""
