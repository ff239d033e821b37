"""Greedy continuation of a decoder that computes all positions at once. Torch-free, and pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = tuple[int, ...]
"""Token ids."""


def continuation(
    chosen_after: Callable[[Row], Sequence[int]], prompt: Row, most: int, stop: Sequence[int], draft: Row = ()
) -> Row:
    """Return the tokens chosen after `prompt`: at least one and at most `most`; a stop token is the last.

    `chosen_after` returns the chosen token after each token of a sequence. A correct `draft` needs one call, and each
    wrong token of a guess another call.
    """
    found: list[int] = []
    guess = list(draft[: most - 1])
    while True:
        known = len(found)
        chosen = chosen_after((*prompt, *guess))[len(prompt) - 1 + known :]
        for token in chosen:
            found.append(token)
            if len(found) == most or token in stop:
                return tuple(found)
            if len(found) > len(guess) or guess[len(found) - 1] != token:
                break
        # The tokens chosen after a wrong guess are the next guess.
        guess = [*found, *chosen[len(found) - known :]][: most - 1]
