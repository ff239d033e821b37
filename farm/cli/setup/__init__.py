"""Commands about this machine: what is installed, signed, cached and kept."""
