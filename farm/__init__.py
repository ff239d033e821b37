"""Runs ExecuTorch operator and model suites on Snapdragon devices and stores every number."""

__version__ = "0.2.0"
