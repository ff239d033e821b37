"""Decoders that generate text, compiled by ExecuTorch's own Qualcomm examples. Imports torch and executorch."""
