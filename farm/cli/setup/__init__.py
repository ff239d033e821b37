"""Commands about this machine: toolchains, SDKs, runtimes, signing, caches and old runs."""
