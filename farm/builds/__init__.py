"""Toolchains, compiling, bundles, programs and runtimes: a job becomes files for a device."""
