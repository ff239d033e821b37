"""Dispatcher for the devices of a host: job sources, device runners, device processes, result log."""
