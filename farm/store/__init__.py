"""The database of runs, attempts, numbers, leases and devices; files by content."""
