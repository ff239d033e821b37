"""Files that the hosts of a shared farm have in common, by the hash of their content."""
