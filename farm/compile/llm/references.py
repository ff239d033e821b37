"""What a decoder says on the CPU: logits of whole sequences, and what it goes on with, greedy. Imports torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.compile.llm.greedy import Row


def log_probabilities(logits: torch.Tensor, sequence: Row) -> torch.Tensor:
    """Return float32 [tokens, 2]: by position the logarithm of the probability of what follows, and of the likeliest.

    It is 0 after the last token, which nothing follows.
    """
    every = torch.log_softmax(logits[: len(sequence)].double(), dim=-1)
    found = torch.zeros(len(sequence), 2)
    following = torch.tensor(sequence[1:], dtype=torch.int64)
    found[:-1, 0] = every[:-1].gather(1, following[:, None])[:, 0].float()
    found[:-1, 1] = every[:-1].amax(dim=-1).float()
    return found


class WholeContext:
    """A decoder that takes its whole context at once, each position attending to those before: in FP32 or quantized."""

    def __init__(self, inference: Any, masks: Sequence[torch.Tensor]) -> None:
        """`inference` is ExecuTorch's, which has positions and empty caches; `masks` are those of a full context."""
        self._inference = inference
        self._masks = tuple(masks)

    def logits(self, module: torch.nn.Module, tokens: Row) -> torch.Tensor:
        """Return float32 [tokens, vocabulary] of an exported `module`, whose sizes are fixed."""
        padded = torch.zeros(1, self._masks[0].shape[-1], dtype=torch.int32)
        padded[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        found = self._inference.predict_step(module, padded, self._masks)
        return torch.as_tensor(found[0, : len(tokens)]).float().clone()

    def eager_logits(self, module: torch.nn.Module, tokens: Row) -> torch.Tensor:
        """Return the same of a `module` that is not exported, at the cost of those tokens alone."""
        return self._step(module, tokens, 0, self._no_caches())[0]

    def eager_continuation(self, module: torch.nn.Module, prompt: Row, most: int, stop: Sequence[int]) -> Row:
        """Return what an eager `module` goes on with after `prompt`: at most `most` tokens, a stop token the last."""
        caches, start, pending, found = self._no_caches(), 0, prompt, list[int]()
        while len(found) < most and not (found and found[-1] in stop):
            logits, caches = self._step(module, pending, start, caches)
            start += len(pending)
            found.append(int(logits[-1].argmax()))
            pending = (found[-1],)
        return tuple(found)

    def _no_caches(self) -> list[torch.Tensor]:
        return [*self._inference._k_caches, *self._inference._v_caches]  # noqa: SLF001 - no other name

    def _step(
        self, module: torch.nn.Module, tokens: Row, start: int, caches: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        end = start + len(tokens)
        masks = (mask[:, :, start:end, :end] for mask in self._masks)
        positions = self._inference.pos_ids[:1, start:end]
        logits, keys, values = module(torch.tensor([tokens], dtype=torch.int32), *masks, positions, *caches)
        half = len(caches) // 2
        grown = [torch.cat(pair, dim=-1) for pair in zip(caches[:half], keys, strict=True)]
        grown += [torch.cat(pair, dim=2) for pair in zip(caches[half:], values, strict=True)]
        return logits[0].float(), grown
