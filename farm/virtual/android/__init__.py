"""A virtual device with Android's own daemon and tools: Debian's packages of them, in a chroot and namespaces."""
