"""ExecuTorch's ways from a module to a program, one for each kind of backend."""
