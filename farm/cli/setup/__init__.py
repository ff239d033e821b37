"""Commands about this machine: toolchains, SDKs, runtimes, signing and caches; rights and quotas of a lab."""
