"""`farm run` on one machine: steps of a run, builds, watch mode."""
