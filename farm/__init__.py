"""Runs ExecuTorch operator and model suites on Snapdragon devices and remembers every number."""

__version__ = "0.2.0"
