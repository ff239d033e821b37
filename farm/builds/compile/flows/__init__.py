"""Flows of ExecuTorch from a module to a program, one for each kind of backend."""
