"""A stub of a transport: a folder of this machine instead of a device, to try what needs none."""
