"""Profiles of programs: ETDump -> cycles of each node."""
