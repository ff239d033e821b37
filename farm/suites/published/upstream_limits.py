"""What ExecuTorch expects of the decoders that it publishes programs of, for its own CI.

From `TestExampleLLMScript.setUp` of backends/qualcomm/tests/test_qnn_delegate.py in the wheel of 1.5.1, which
tests/test_published.py compares with it. All of it holds for mode kv with 1,024 positions, and for published weights.
"""

from __future__ import annotations

import msgspec


class UpstreamLimits(msgspec.Struct, frozen=True):
    """Of one decoder; None is what it names no limit for."""

    rates: dict[str, float]
    """Tokens a second at least, by SoC."""
    pte_bytes: int
    """Of the program, at most."""
    word_perplexity: float | None
    """Of the first page of wikitext, at most."""
    sqnr_db: float | None
    """Of the logits of PROMPT against the FP32 module's, at least."""
    acc_norm: float | None = None
    """Of the first ten questions of hellaswag, at least."""


CONTEXT = 1024
PROMPT = "I would like to learn python, could you teach me with a simple example?"
QUESTIONS = 10


def _limits(
    sm8650: float, sm8750: float, megabytes: int, perplexity: float | None, sqnr: float | None, acc: float | None = None
) -> UpstreamLimits:
    return UpstreamLimits({"SM8650": sm8650, "SM8750": sm8750}, megabytes * 1_000_000, perplexity, sqnr, acc)


UPSTREAM_LIMITS: dict[str, UpstreamLimits] = {
    "smollm2_135m": _limits(214, 260, 210, 23, 19),
    "qwen2_5-0_5b": _limits(115, 155, 600, 15, 8),
    "gemma3-1b": _limits(70, 100, 1200, 23, 10),
    "qwen3-0_6b": _limits(47, 68, 700, 21, 7),
    "glm-1_5b": _limits(42, 52, 1100, 21, 14),
    "qwen2_5-1_5b": _limits(38, 47, 1500, 10, 10),
    "llama3_2-1b_instruct": _limits(37, 45, 1500, 18, 15),
    "gemma-2b": _limits(32, 36, 2700, 17, 27),
    "gemma2-2b": _limits(32, 36, 2860, 14, 27),
    "qwen3-1_7b": _limits(28, 34, 1800, 15, 12),
    "smollm3-3b": _limits(23, 28, 2600, 10, 6),
    "llama3_2-3b_instruct": _limits(21, 26, 2800, 11, 14),
    "granite_3_3-2b_instruct": _limits(20, 22, 1600, None, None, 0.2),
    "phi_4_mini": _limits(14, 19, 4000, 14, 20),
}
"""By the name of the architecture. gemma4-e2b has limits as well, and is no decoder that farm makes."""
