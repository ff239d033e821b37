"""Toolchains: interpreters with ExecuTorch, QNN SDKs, and their identity by content."""
