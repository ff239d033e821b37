"""State of a case between inferences: an output that becomes an input. Torch-free, pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

_Index = Annotated[int, msgspec.Meta(ge=0, le=4096)]


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Input `input` of an inference is output `output` of the one before it, bit for bit.

    The first inference takes the input as it is; executions of one inference, warm-up among them, all take the same.
    """

    output: _Index
    input: _Index


def state_problem(state: Sequence[State], inputs: int, samples: int) -> str:
    """Return the reason why `state` does not fit a case with so many inputs and samples; "" for none."""
    if not state:
        return ""
    if samples < 2:
        return "goes from one sample to the next, and there is one: give the case samples = 2 or more"
    if beyond := [one.input for one in state if one.input >= inputs]:
        return f"names input {beyond[0]}, and there are {inputs}, from 0"
    taken = [one.input for one in state]
    if twice := [one for one in taken if taken.count(one) > 1]:
        return f"gives input {twice[0]} two outputs: name it once"
    return ""


def order_problem(state: State, given: Sequence[int], taken: Sequence[int]) -> str:
    """Return why an output in the memory order `given` cannot become an input in the order `taken`; "" where it can.

    The runner copies bytes.
    """
    if tuple(given) == tuple(taken):
        return ""
    first, second = (f"in the order {list(order)}" if order else "in C order" for order in (given, taken))
    places = f"output {state.output} lies {first} in memory, input {state.input} {second}"
    what_to_do = "keep the module in C order, without memory_format=torch.channels_last"
    return f"{state.output}:{state.input}: {places}: {what_to_do}"
