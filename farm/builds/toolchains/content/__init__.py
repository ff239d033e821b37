"""Identity of a toolchain by content, and the origin of its code."""
