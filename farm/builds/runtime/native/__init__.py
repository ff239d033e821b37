"""Builds of native_runner/, Python packages built for other machines, and the headers of their ELF files."""
