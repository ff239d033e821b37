"""Shortcuts of a compilation: repeated work of torch and ExecuTorch is left out, with equal programs."""
