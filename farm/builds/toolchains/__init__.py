"""What compiles: interpreters with ExecuTorch, QNN SDKs, and what they are by content."""
