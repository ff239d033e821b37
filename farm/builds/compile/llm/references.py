"""References of a decoder on the CPU: logits of whole sequences and greedy continuations. Imports torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farm.builds.compile.flows.calls import copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.builds.compile.llm.greedy import Row


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


class Stepwise:
    """Exported decoder of fixed sizes that takes the last token and has the tokens before it in caches."""

    def __init__(self, module: torch.nn.Module, inference: Any) -> None:
        """Take `inference`, ExecuTorch's inference of the decoder."""
        self._module = module
        self._context = inference.max_context_len
        self._room = inference._k_caches[0].shape[-1]  # noqa: SLF001 - no other name
        self._width = self._context - self._room

    def caches(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return caches with `columns`: the keys and values of every position, from a decoder of the whole context."""
        return [
            one.narrow(axis, 0, self._room).clone(memory_format=torch.contiguous_format)
            for axis, one in zip(_position_axes(columns), columns, strict=True)
        ]

    def after(self, token: int, done: int, masks: Sequence[torch.Tensor], caches: Sequence[torch.Tensor]) -> int:
        """Return the token after `token`, which has `done` tokens before it, and add its keys and values to the caches.

        `masks` are the masks of a full context. In a step of several tokens, no position attends to the padding behind
        the first.
        """
        tokens = torch.zeros(1, self._width, dtype=torch.int32)
        tokens[0, 0] = token
        positions = torch.arange(done, done + self._width, dtype=torch.int32).clamp_(max=self._context - 1)[None]
        steps = []
        for mask in masks:
            step = torch.full((1, 1, self._width, self._context), float(mask.min()))
            step[0, 0, 0, :done] = mask[0, 0, done, :done]
            step[0, 0, 0, self._room] = mask[0, 0, done, done]
            steps.append(step)
        logits, keys, values = self._module(*copies((tokens, *steps, positions, *caches)))
        if done < self._room:
            for axis, cache, one in zip(_position_axes(caches), caches, [*keys, *values], strict=True):
                cache.narrow(axis, done, 1).copy_(one.narrow(axis, 0, 1))
        return int(logits[0, 0].argmax())


class WholeContext:
    """Decoder of its whole context at once, in FP32 or quantized; each position attends to the positions before it."""

    def __init__(self, inference: Any, masks: Sequence[torch.Tensor]) -> None:
        """Take ExecuTorch's `inference`, with positions and empty caches, and the `masks` of a full context."""
        self._inference = inference
        self._masks = tuple(masks)

    def logits(self, module: torch.nn.Module, tokens: Row) -> torch.Tensor:
        """Return float32 [tokens, vocabulary] of an exported `module`, whose sizes are fixed."""
        return self._logits_and_columns(module, tokens)[0][: len(tokens)].float().clone()

    def continuation(
        self, module: torch.nn.Module, stepwise: Stepwise, prompt: Row, most: int, stop: Sequence[int]
    ) -> Row:
        """Return the greedy continuation of `prompt`: the first token by an exported `module`, the rest by `stepwise`.

        `stepwise` computes in another order, which nearly always gives the same tokens, and computes each step alone.
        """
        logits, columns = self._logits_and_columns(module, prompt)
        found = [int(logits[len(prompt) - 1].argmax())]
        caches = stepwise.caches(columns)
        while len(found) < most and found[-1] not in stop:
            found.append(stepwise.after(found[-1], len(prompt) + len(found) - 1, self._masks, caches))
        return tuple(found)

    def _logits_and_columns(self, module: torch.nn.Module, tokens: Row) -> tuple[torch.Tensor, list[torch.Tensor]]:
        padded = torch.zeros(1, self._masks[0].shape[-1], dtype=torch.int32)
        padded[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        logits, keys, values = module(*copies(self._inference.get_inputs(padded, self._masks)))
        return torch.as_tensor(logits)[0], [*keys, *values]

    def eager_logits(self, module: torch.nn.Module, tokens: Row) -> torch.Tensor:
        """Return the logits as `logits` does, of an eager `module` and at the cost of `tokens` alone."""
        return self._step(module, tokens, 0, self._no_caches())[0]

    def eager_continuation(self, module: torch.nn.Module, prompt: Row, most: int, stop: Sequence[int]) -> Row:
        """Return the greedy continuation of `prompt` by an eager `module`: at most `most` tokens, a stop token last."""
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
        given = (torch.tensor([tokens], dtype=torch.int32), *masks, positions, *caches)
        logits, keys, values = module(*copies(given))
        new = [*keys, *values]
        axes = _position_axes(caches)
        grown = [torch.cat(pair, dim=axis) for axis, *pair in zip(axes, caches, new, strict=True)]
        return logits[0].to(torch.float32, copy=True), grown
