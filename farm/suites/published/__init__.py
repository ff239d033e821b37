"""Published decoders: what ExecuTorch expects of them, and a suite of those whose checkpoints somebody has."""
