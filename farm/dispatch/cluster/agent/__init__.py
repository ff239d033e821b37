"""Agent of a host: work on the host's devices and with its compilers."""
