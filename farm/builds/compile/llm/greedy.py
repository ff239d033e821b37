"""What a decoder goes on with, greedy, where it is asked for all positions at once. Torch-free, and pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = tuple[int, ...]
"""Token ids."""


def continuation(
    chosen_after: Callable[[Row], Sequence[int]], prompt: Row, most: int, stop: Sequence[int], draft: Row = ()
) -> Row:
    """Return what is chosen after `prompt`, token by token: at most `most`, at least one, a stop token the last.

    `chosen_after` gives what is chosen after each token of a sequence. It is asked once where `draft` is right, and
    again from the first token on that is not.
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
        # What would have come after a wrong guess is the next guess.
        guess = [*found, *chosen[len(found) - known :]][: most - 1]
