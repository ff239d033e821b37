"""Processes, files, names and text of this machine."""
