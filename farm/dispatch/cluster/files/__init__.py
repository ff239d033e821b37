"""Files that hosts of a shared farm exchange, by the hash of their content: runtimes and the code of suites."""
