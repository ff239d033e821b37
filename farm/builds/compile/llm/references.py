"""References of a decoder on the CPU: logits of whole sequences and greedy continuations. Imports torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farm.builds.compile.flows.calls import copies
from farm.builds.compile.llm.greedy import Row, continuation


def log_probabilities(logits: torch.Tensor, sequence: Row) -> torch.Tensor:
    """Return float32 [tokens, 2]: by position the log-probability of the next token, and of the likeliest token.

    Both are 0 after the last token, which has no next token.
    """
    every = torch.log_softmax(logits[: len(sequence)].double(), dim=-1)
    found = torch.zeros(len(sequence), 2)
    following = torch.tensor(sequence[1:], dtype=torch.int64)
    found[:-1, 0] = every[:-1].gather(1, following[:, None])[:, 0].float()
    found[:-1, 1] = every[:-1].amax(dim=-1).float()
    return found


def _position_axes(caches: Sequence[torch.Tensor]) -> list[int]:
    """Return the axis of positions of each cache: keys are first, [1,H,D,C], and values follow, [1,H,C,D]."""
    layers = len(caches) // 2
    return [3] * layers + [2] * layers


class EagerDecoder:
    """FP32 decoder, at the cost of the given tokens alone; each position attends to the positions before it."""

    def __init__(self, module: torch.nn.Module, inference: Any, masks: Sequence[torch.Tensor]) -> None:
        """Take ExecuTorch's `inference`, with positions and empty caches, and the `masks` of a full context."""
        self._module, self._inference, self._masks = module, inference, masks

    def logits(self, tokens: Row) -> torch.Tensor:
        """Return float32 [tokens, vocabulary]."""
        return self._step(tokens, 0, self._no_caches())[0]

    def continuation(self, prompt: Row, most: int, stop: Sequence[int]) -> Row:
        """Return the greedy continuation of `prompt`: at most `most` tokens, a stop token last."""
        caches, start, pending, found = self._no_caches(), 0, prompt, list[int]()
        while len(found) < most and not (found and found[-1] in stop):
            logits, caches = self._step(pending, start, caches)
            start += len(pending)
            found.append(int(logits[-1].argmax()))
            pending = (found[-1],)
        return tuple(found)

    def _no_caches(self) -> list[torch.Tensor]:
        return [*self._inference._k_caches, *self._inference._v_caches]  # noqa: SLF001 - no other name

    def _step(self, tokens: Row, start: int, caches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        end = start + len(tokens)
        masks = (mask[:, :, start:end, :end] for mask in self._masks)
        positions = self._inference.pos_ids[:1, start:end]
        given = (torch.tensor([tokens], dtype=torch.int32), *masks, positions, *caches)
        logits, keys, values = self._module(*copies(given))
        new = [*keys, *values]
        axes = _position_axes(caches)
        grown = [torch.cat(pair, dim=axis) for axis, *pair in zip(axes, caches, new, strict=True)]
        return logits[0].to(torch.float32, copy=True), grown


class QuantizedDecoder:
    """Quantized decoder: exported modules of fixed sizes, one for the whole context and one for the last token.

    The module for the last token has the tokens before it in caches. It computes in another order, which nearly always
    gives the same tokens.
    """

    def __init__(self, decoder: Any, inference: Any, masks: Sequence[torch.Tensor]) -> None:
        """Take ExecuTorch's `decoder`, with the `inference` and the `masks` of a full context."""
        self._whole, self._inference, self._masks = decoder.calibration_prefill.decoder, inference, masks
        self._step, step_inference = decoder.decode.decoder, decoder.decode._decoder_inference  # noqa: SLF001 - no other name
        self._context = step_inference.max_context_len
        self._room = step_inference._k_caches[0].shape[-1]  # noqa: SLF001 - as above
        self._width = self._context - self._room

    def logits(self, tokens: Row) -> torch.Tensor:
        """Return float32 [tokens, vocabulary]."""
        return self._logits_and_columns(tokens)[0][: len(tokens)].float().clone()

    def continuation(self, prompt: Row, most: int, stop: Sequence[int]) -> Row:
        """Return the greedy continuation of `prompt` by the module of the whole context; the other makes the draft."""

        def chosen(tokens: Row) -> list[int]:
            return [int(token) for token in self.logits(tokens).argmax(dim=-1)]

        return continuation(chosen, prompt, most, stop, self._draft(prompt, most, stop) if most > 1 else ())

    def _draft(self, prompt: Row, most: int, stop: Sequence[int]) -> Row:
        logits, columns = self._logits_and_columns(prompt)
        found = [int(logits[len(prompt) - 1].argmax())]
        caches = [
            one.narrow(axis, 0, self._room).clone(memory_format=torch.contiguous_format)
            for axis, one in zip(_position_axes(columns), columns, strict=True)
        ]
        while len(found) < most and found[-1] not in stop:
            found.append(self._after(found[-1], len(prompt) + len(found) - 1, caches))
        return tuple(found)

    def _logits_and_columns(self, tokens: Row) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits, and the keys and values of every position."""
        padded = torch.zeros(1, self._masks[0].shape[-1], dtype=torch.int32)
        padded[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        logits, keys, values = self._whole(*copies(self._inference.get_inputs(padded, self._masks)))
        return torch.as_tensor(logits)[0], [*keys, *values]

    def _after(self, token: int, done: int, caches: Sequence[torch.Tensor]) -> int:
        """Return the token after `token`, which has `done` tokens before it, and add its keys and values to the caches.

        In a step of several tokens, no position attends to the padding behind the first.
        """
        tokens = torch.zeros(1, self._width, dtype=torch.int32)
        tokens[0, 0] = token
        positions = torch.arange(done, done + self._width, dtype=torch.int32).clamp_(max=self._context - 1)[None]
        steps = []
        for mask in self._masks:
            step = torch.full((1, 1, self._width, self._context), float(mask.min()))
            step[0, 0, 0, :done] = mask[0, 0, done, :done]
            step[0, 0, 0, self._room] = mask[0, 0, done, done]
            steps.append(step)
        logits, keys, values = self._step(*copies((tokens, *steps, positions, *caches)))
        if done < self._room:
            for axis, cache, one in zip(_position_axes(caches), caches, [*keys, *values], strict=True):
                cache.narrow(axis, done, 1).copy_(one.narrow(axis, 0, 1))
        return int(logits[0, 0].argmax())
