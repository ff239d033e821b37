"""Backends: a descriptor for each, and the registry."""
