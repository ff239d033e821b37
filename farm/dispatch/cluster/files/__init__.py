"""What travels between the hosts of a shared farm: runtimes and the code of suites, by the hash of its content."""
