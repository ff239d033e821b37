"""The transport to this machine, where it is the device itself."""
