"""Options of a backend: what they are called, what they may be, and whether they apply when compiling or when running.

A compile-time option has the name of the parameter of ExecuTorch's `generate_*_compiler_spec`, and another value of it
is another bundle. A run-time option has the name of the runner's flag; it holds for a whole process of the runner.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal

import msgspec

from farm.errors import IllegalTargetError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from farm.suites.suite import OptionSet, Target

_INT_MAX = 2**31 - 1
_MOST_SETS = 1000


class BackendOption(msgspec.Struct, frozen=True):
    """One option of one backend."""

    when: Literal["compile", "run"]
    words: dict[str, int] = {}
    """What the option may be, with ExecuTorch's number for it; empty for a plain number."""
    least: int = 0
    greatest: int = _INT_MAX
    help: str = ""
    set_by: str = ""
    """What sets it; "" for the user's --option."""

    def normalize(self, name: str, text: str) -> str:
        """Return the one spelling of a value. Raises UsageError, UnknownNameError."""
        if not self.words:
            digits = text.lstrip("0") or "0"
            fits = text.isascii() and text.isdecimal() and len(digits) <= len(str(self.greatest))
            if not fits or not self.least <= int(digits) <= self.greatest:
                raise UsageError(f"option {name}={text[:40]}: expected a number from {self.least} to {self.greatest}")
            return digits
        folded = text.casefold()
        for word, number in self.words.items():
            if folded in (word, str(number)):
                return word
        raise UnknownNameError(f"value of option {name}", text, self.words)


_SWITCH = {"false": 0, "true": 1}

# ExecuTorch 1.5, qc_schema: QnnExecuTorchHtpPerformanceMode, QnnExecuTorchLpaiClientPerf, ...LpaiCoreAffinity and
# QnnExecuTorchGpuPrecision; a test compares.
_PERFORMANCE = {
    "default": 0,
    "sustained_high_performance": 1,
    "burst": 2,
    "high_performance": 3,
    "power_saver": 4,
    "low_power_saver": 5,
    "high_power_saver": 6,
    "low_balanced": 7,
    "balanced": 8,
}
_CLIENT = {"real_time": 1, "non_real_time": 2}
_AFFINITY = {"soft": 1, "hard": 2}
_PRECISION = {"fp32": 0, "fp16": 1, "hybrid": 2, "user_provided": 3}


def _lpai(when: Literal["compile", "run"], prefix: str) -> dict[str, BackendOption]:
    return {
        f"{prefix}fps": BackendOption(when, least=1, help="inferences a second that the clock is chosen for"),
        f"{prefix}ftrt_ratio": BackendOption(when, least=1, help="tenths by which the base clock is multiplied"),
        f"{prefix}client_perf_type": BackendOption(when, _CLIENT, help="whether missing the time is an error"),
        f"{prefix}affinity": BackendOption(when, _AFFINITY, help="whether other cores than the selected may be used"),
        f"{prefix}core_selection": BackendOption(when, help="bit mask of cores, 0 for any"),
    }


OPTIONS: dict[str, dict[str, BackendOption]] = {
    "htp": {
        "htp_performance_mode": BackendOption("run", _PERFORMANCE, help="clocks and sleep that are voted for"),
        "profile_level": BackendOption("compile", {"optrace": 3}, set_by="--profile optrace"),
        "use_dlbc": BackendOption("compile", _SWITCH, help="inputs compressed on their way"),
        "use_slc_allocator": BackendOption("compile", _SWITCH, help="the system level cache, on SoCs that have it"),
    },
    "lpai": {**_lpai("compile", ""), **_lpai("run", "lpai_")},
    "gpu": {
        "precision": BackendOption("compile", _PRECISION, help="of storage and computation, whatever the job's is"),
        "use_memory_optimizations": BackendOption("compile", _SWITCH, help="memory shared between tensors"),
        "use_node_optimizations": BackendOption("compile", _SWITCH, help="operations fused"),
        "use_queue_recording": BackendOption("compile", _SWITCH, help="command queues recorded"),
        "use_weight_sharing": BackendOption("compile", _SWITCH, help="weights shared between graphs"),
    },
    "xnnpack": {},
}
"""By backend and name."""


def parse_options(texts: Iterable[str], backend: str) -> tuple[OptionSet, ...]:
    """Return every combination of `name=value,value` texts for `backend`; one empty set where there is no text.

    Raises UnknownNameError with the nearest name, IllegalTargetError for an option of another backend, UsageError for
    a value that cannot be, or an option that is given twice.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        name, equals, given = (part.strip() for part in text.partition("="))
        if not equals or not given:
            raise UsageError(f"option {text!r} is not understood: expected name=value or name=value,value")
        option = _find(name, backend)
        if name in values:
            raise UsageError(f"option {name} is given twice: write {name}=value,value to run with each")
        values[name] = list(dict.fromkeys(option.normalize(name, value.strip()) for value in given.split(",")))
    names = sorted(values)
    sets = tuple(itertools.islice(itertools.product(*(values[name] for name in names)), _MOST_SETS + 1))
    if len(sets) > _MOST_SETS:
        raise UsageError(f"these options make more than {_MOST_SETS} combinations: give fewer values")
    return tuple(tuple(zip(names, chosen, strict=True)) for chosen in sets)


def check_options(target: Target) -> None:
    """Raise UnknownNameError for an option that a target's backend does not have, UsageError for a wrong value."""
    options = OPTIONS[target.backend]
    for name, value in target.options:
        if name not in options:
            raise UnknownNameError(f"option of the {target.backend} backend", name, options)
        options[name].normalize(name, value)


def compile_options(target: Target) -> dict[str, str]:
    """Return the options of `target` that apply when compiling, so that they belong to its bundle."""
    return _chosen(target, "compile")


def runtime_flags(target: Target) -> dict[str, str]:
    """Return the runner's flags for the options of `target` that apply when running, values as numbers."""
    options = OPTIONS[target.backend]
    return {name: str(options[name].words.get(value, value)) for name, value in _chosen(target, "run").items()}


def _chosen(target: Target, when: str) -> dict[str, str]:
    known: Mapping[str, BackendOption] = OPTIONS[target.backend]
    return {name: value for name, value in target.options if known[name].when == when}


def _find(name: str, backend: str) -> BackendOption:
    if backend not in OPTIONS:
        raise UnknownNameError("backend", backend, OPTIONS)
    option = OPTIONS[backend].get(name)
    if option is not None:
        if option.set_by:
            raise IllegalTargetError(f"option {name} is set by {option.set_by}: use that")
        return option
    others = [other for other, options in OPTIONS.items() if name in options]
    if others:
        raise IllegalTargetError(f"option {name} is for {', '.join(others)}, not for the {backend} backend")
    known = [known for known, one in OPTIONS[backend].items() if not one.set_by]
    raise UnknownNameError(f"option of the {backend} backend", name, known)
