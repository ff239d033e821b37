"""Coverage of a backend's operators by suites: the table and its sources."""
