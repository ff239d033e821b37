"""Options of targets, from a command's text to settings of compiler and runner, and the limits that decide a job."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from farm.base.backends.descriptor import DIRECT_MODE, QUANTIZED_PRECISIONS, BackendOption
from farm.base.backends.registry import BACKENDS, find_backend, runs_on_cpu
from farm.base.errors import ConfigError, IllegalTargetError, UnknownNameError, UsageError
from farm.suites.figures import COMPARED
from farm.suites.suite import Job, Limits, OptionSet, Target

# Options of targets: from a command's text to settings of compiler and runner; frame rate, clock and cores.


# Options of targets: from a command's text to settings of compiler and runner.


_MOST_SETS = 1000


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
    _check_direct(values, backend)
    option_sets = tuple(tuple(zip(names, chosen, strict=True)) for chosen in sets)
    for options in option_sets:
        _check_needs(options, backend)
    return option_sets


def _check_needs(chosen: OptionSet, backend: str) -> None:
    """Raise UsageError for an option that has no effect as the others are."""
    for name, value in chosen:
        needs = BACKENDS[backend].options[name].needs
        if needs is not None and needs not in chosen:
            raise UsageError(f"option {name}={value} has no effect without {'='.join(needs)}: give both")


def _check_direct(values: Mapping[str, Sequence[str]], backend: str) -> None:
    """Raise UsageError for both modes in one run, IllegalTargetError for a flag that direct mode's runner has not."""
    modes = values.get(DIRECT_MODE, ())
    if len(modes) > 1:
        raise UsageError(
            f"{DIRECT_MODE} has files of its own on a device: run {DIRECT_MODE}=true and =false apart, or "
            f"compare both with farm perf compare --options {DIRECT_MODE}=false --options {DIRECT_MODE}=true"
        )
    flags = [name for name in values if BACKENDS[backend].options[name].when == "run"]
    if "true" in modes and flags:
        raise IllegalTargetError(
            f"option {flags[0]} is a flag of the runner, and the runner of direct mode has no such flag: leave it or "
            f"{DIRECT_MODE} out"
        )


def check_options(target: Target) -> None:
    """Raise UnknownNameError for an option that a target's backend does not have, UsageError for a wrong value."""
    options = BACKENDS[target.backend].options
    for name, value in target.options:
        if name not in options:
            raise UnknownNameError(f"option of the {target.backend} backend", name, options)
        options[name].normalize(name, value)
    _check_needs(target.options, target.backend)


def compile_options(target: Target) -> dict[str, str]:
    """Return the options of `target` that apply when compiling, so that they belong to its bundle."""
    return _chosen(target, "compile")


def runtime_flags(target: Target) -> dict[str, str]:
    """Return the runner's flags for the options of `target` that apply when running, values as numbers."""
    options = BACKENDS[target.backend].options
    return {name: str(options[name].words.get(value, value)) for name, value in _chosen(target, "run").items()}


def compile_numbers(target: Target) -> dict[str, int]:
    """Return the options of `target` that apply when compiling, as ExecuTorch's numbers."""
    options = BACKENDS[target.backend].options
    return {name: int(options[name].words.get(value, value)) for name, value in compile_options(target).items()}


def _chosen(target: Target, when: str) -> dict[str, str]:
    options = BACKENDS[target.backend].options
    return {name: value for name, value in target.options if options[name].when == when}


def _find(name: str, backend: str) -> BackendOption:
    options = find_backend(backend).options
    if (option := options.get(name)) is not None:
        if option.set_by:
            raise IllegalTargetError(f"option {name} is set by {option.set_by}: use that")
        return option
    if others := [other.name for other in BACKENDS.values() if name in other.options]:
        raise IllegalTargetError(f"option {name} is for {', '.join(others)}, not for the {backend} backend")
    settable = [known for known, one in options.items() if not one.set_by]
    raise UnknownNameError(f"option of the {backend} backend", name, settable)


# Frame rate, clock and cores of a target, for a backend that refuses unsupported values. Pure.


_SWEPT = ("fps", "ftrt_ratio", "core_selection")


class FrameSetting(msgspec.Struct, frozen=True):
    """Setting that a program runs with: run time, else compiler, else default."""

    fps: int
    ftrt_ratio: int
    cores: int
    """Bit mask, 0 for any."""
    on_time: bool
    """A program whose time cannot be kept is refused."""
    others: tuple[tuple[str, str], ...]
    """Options of the target that the setting leaves out: what else differs between two programs."""

    @property
    def text(self) -> str:
        """`fps 5, ftrt_ratio 10, core_selection 0`."""
        return f"fps {self.fps}, ftrt_ratio {self.ftrt_ratio}, core_selection {self.cores}"


def frame_setting(backend: str, options: Mapping[str, str]) -> FrameSetting | None:
    """Return the setting of a target, None for a backend without one."""
    defaults = BACKENDS[backend].frame_defaults if backend in BACKENDS else {}
    if not defaults:
        return None

    def value(name: str) -> str:
        return options.get(f"{backend}_{name}") or options.get(name) or defaults[name]

    return FrameSetting(
        fps=int(value("fps")),
        ftrt_ratio=int(value("ftrt_ratio")),
        cores=int(value("core_selection")),
        on_time=value("client_perf_type") == "real_time",
        others=tuple((name, text) for name, text in options.items() if name.removeprefix(f"{backend}_") not in _SWEPT),
    )


def late_flags(target: Target) -> dict[str, str]:
    """Return the runner's flags with which QNN refuses no program for its time; {} where that changes nothing.

    The runner of direct mode has no such flag.
    """
    setting = frame_setting(target.backend, dict(target.options))
    if setting is None or not setting.on_time or target.direct:
        return {}
    name = f"{target.backend}_client_perf_type"
    return {name: str(BACKENDS[target.backend].options[name].words["non_real_time"])}


# Check that the limits of a case decide its verdict: a job without deciding limits is refused before its build.


MANIFEST = "suite.toml"
FIRST_LIMITS = "{ sqnr_db = 10.0, mismatch = 0.0 }"
"""Limits against FP32 for a first run, whose results suggest better ones."""


def references_of(job: Job) -> tuple[str, ...]:
    """Return the references for the outputs of `job`; none for a job without expected outputs."""
    case, target = job.case, job.target
    if case.pte:
        return ("fp32",) if case.module or case.program or case.expected else ()
    quantizes = target.precision in QUANTIZED_PRECISIONS and not runs_on_cpu(target.backend)
    return ("fp32", "quantized") if quantizes else ("fp32",)


def require_limits(jobs: Iterable[Job]) -> None:
    """Raise ConfigError, which names manifest, key and what to write, for jobs that no limit can decide."""
    undecided = [job for job in jobs if not _is_decided(job)]
    if not undecided:
        return
    first = undecided[0].case
    precision = undecided[0].target.precision
    keys = dict.fromkeys(f"case.{job.case.name}.tolerance.{job.target.precision}" for job in undecided)
    key, *others = keys
    shown = f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
    problem = (
        f"no limit decides its outputs at {precision}: for a first run write [{key}] with fp32 = {FIRST_LIMITS}, "
        f"then 'farm suites tune {first.suite}/{first.name}' suggests better ones; or leave {precision} out"
    )
    raise ConfigError(first.manifest, key, f"{problem}{f' (so it is with {shown})' if others else ''}")


def _is_decided(job: Job) -> bool:
    references = references_of(job)
    if not references:
        return True
    issue = job.known_issue
    if issue is not None and issue.stage != "numerics":
        # The job ends before its outputs are judged.
        return True
    tolerance = msgspec.structs.asdict(job.case.tolerance(job.target.precision))
    logits = job.case.generate is not None
    return any(_decides(tolerance[reference], logits=logits) for reference in references)


def _decides(limits: Limits, *, logits: bool) -> bool:
    return any(
        figure.decides
        and (limit := getattr(limits, figure.name)) is not None
        and figure.can_break(limit)
        and (logits or not figure.of_logits)
        for figure in COMPARED
    )
