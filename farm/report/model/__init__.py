"""Data of a report, computed without side effects."""
