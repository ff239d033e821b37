"""Leases and registry of devices: rows, and decisions about them."""
