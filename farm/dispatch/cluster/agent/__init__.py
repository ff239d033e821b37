"""The agent of a host: what it does with the devices, and compilers, that are there."""
