"""Reports as lines of a terminal. Pure."""
