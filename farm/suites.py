"""test_suites/*/suite.toml -> Suite and Case; suites x targets -> Jobs. Torch is never imported here."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from farm.errors import ConfigError, IllegalTargetError, UnknownNameError
from farm.profiles import BACKEND_PRECISIONS, CPU_BACKENDS, PRECISIONS, Soc, check_target, load_socs
from farm.resources import data_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

OptionSet = tuple[tuple[str, str], ...]
"""Options of one target, name and value, sorted by name: farm/options.py."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")
_FACTORY = re.compile(r"\.?[A-Za-z_][\w.]*:[A-Za-z_]\w*")

DType = Literal["float32", "int32", "int64", "bool"]
Distribution = Literal["normal", "uniform", "integers", "arange", "linspace", "constant"]


_CPU_PRECISIONS = {precision for backend in CPU_BACKENDS for precision in BACKEND_PRECISIONS[backend]}


class _Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class InputSpec(_Frozen, frozen=True):
    """One input tensor, made from its seed: the same on every machine."""

    shape: tuple[int, ...]
    dtype: DType = "float32"
    distribution: Distribution = "normal"
    low: float = -1.0
    """Lower bound of `uniform`, `integers` and `linspace`; the value of `constant`; the mean of `normal` is 0."""
    high: float = 1.0
    """Upper bound: included by `linspace`, excluded by `uniform` and `integers`."""
    scale: float = 1.0
    """Standard deviation of `normal`."""
    seed: int = 0


class Limits(_Frozen, frozen=True):
    """What one output may differ from one reference. A limit that is None is measured but does not decide."""

    sqnr_db: float | None = None
    """Least signal-to-quantization-noise ratio, in dB."""
    cosine: float | None = None
    """Least cosine similarity."""
    max_abs: float | None = None
    """Greatest absolute difference, in the unit of the output."""
    mismatch: float | None = None
    """Greatest share of elements that are not equal, for integer and boolean outputs."""


class Tolerance(_Frozen, frozen=True):
    """Limits against both references: the FP32 module, and the quantized module on the CPU."""

    fp32: Limits = Limits()
    quantized: Limits = Limits()


# What decides where a manifest says nothing. Two ways of computing in float32 differ by its rounding: docs/suites.md.
_DEFAULT_TOLERANCES = {"fp32": Tolerance(fp32=Limits(sqnr_db=100.0, mismatch=0.0))}


class KnownIssue(_Frozen, frozen=True):
    """A failure that is understood: it is shown with its evidence and does not turn a run red."""

    reason: str
    stage: Literal["build", "load", "execute", "numerics"] = "numerics"
    """How far a job comes with it: a failure at another stage is another failure."""
    precisions: tuple[str, ...] = ()
    """Where it shows; empty is everywhere."""
    socs: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    """Empty is everywhere; a manifest that leaves it out means the backends of its suite."""
    evidence: str = ""
    """The figures that show it, and how they were obtained."""


class Case(_Frozen, frozen=True):
    """One module with inputs, precisions and tolerances, independent of any SoC."""

    suite: str
    name: str
    module: str
    """`package.module:Class`, or `.module:Class` for a file in the folder of the suite."""
    inputs: tuple[InputSpec, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    seed: int = 0
    """Seeds torch before the module is made: its weights."""
    samples: int = 1
    """Inferences per attempt, each with inputs of its own (the seed of sample n is seed + 1000 n)."""
    precisions: tuple[str, ...] = ()
    tolerances: dict[str, Tolerance] = {}
    """By precision."""
    known_issues: tuple[KnownIssue, ...] = ()
    folder: str = ""
    """Folder of the suite, where `.module` is looked for."""

    def tolerance(self, precision: str) -> Tolerance:
        """Return what decides at `precision`."""
        return self.tolerances.get(precision) or _DEFAULT_TOLERANCES.get(precision, Tolerance())

    def precisions_on(self, backend: str) -> tuple[str, ...]:
        """Return what the case runs at on `backend`: what it declares, or on the CPU what the backend has."""
        if backend in CPU_BACKENDS:
            return BACKEND_PRECISIONS[backend]
        return tuple(
            precision
            for precision in self.precisions
            if precision not in _CPU_PRECISIONS or precision in BACKEND_PRECISIONS[backend]
        )

    def known_issue(self, target: Target) -> KnownIssue | None:
        """Return the known issue that covers the case on `target`."""
        for issue in self.known_issues:
            places = ((issue.precisions, target.precision), (issue.socs, target.soc), (issue.backends, target.backend))
            if all(not named or one in named for named, one in places):
                return issue
        return None


class Suite(_Frozen, frozen=True):
    """A named list of cases."""

    name: str
    description: str
    backends: tuple[str, ...]
    cases: tuple[Case, ...]
    path: str
    """The manifest it was read from."""


class Target(_Frozen, frozen=True):
    """What a case is compiled for."""

    soc: str
    backend: str
    precision: str
    options: OptionSet = ()

    def __str__(self) -> str:
        options = "".join(f"-{key}={value}" for key, value in self.options)
        return f"{self.soc}-{self.backend}-{self.precision}{options}"


class Job(_Frozen, frozen=True):
    """A case on a target: what is compiled, scheduled and reported."""

    case: Case
    target: Target

    @property
    def id(self) -> str:
        """`suite/case[SoC-backend-precision]`."""
        return f"{self.case.suite}/{self.case.name}[{self.target}]"

    @property
    def known_issue(self) -> KnownIssue | None:
        """Return the known issue that covers this job."""
        return self.case.known_issue(self.target)


# What a manifest looks like; the defaults of its [suite] table fill in what a case leaves out.


class _CaseTable(_Frozen, frozen=True):
    module: str
    inputs: tuple[InputSpec, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    seed: int = 0
    samples: int = 1
    precisions: tuple[str, ...] = ()
    tolerance: dict[str, Tolerance] = {}
    known_issues: tuple[KnownIssue, ...] = ()


class _SuiteTable(_Frozen, frozen=True):
    name: str
    description: str
    backends: tuple[str, ...] = ("htp",)
    precisions: tuple[str, ...] = ("8a8w",)
    tolerance: dict[str, Tolerance] = {}


class _Include(_Frozen, frozen=True):
    suite: str
    cases: tuple[str, ...]
    precisions: tuple[str, ...] = ()


class _Manifest(_Frozen, frozen=True):
    suite: _SuiteTable
    case: dict[str, _CaseTable] = {}
    include: tuple[_Include, ...] = ()
    """Cases taken from a suite in a sibling folder, under their own names."""


def load_suite(manifest: Path, including: tuple[Path, ...] = ()) -> Suite:
    """Read one suite.toml. Raises ConfigError, naming file and key, for anything it cannot mean.

    `including` are the manifests that brought us here.
    """
    try:
        table = msgspec.toml.decode(manifest.read_bytes(), type=_Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(manifest, "", str(error)) from None
    except OSError as error:
        raise ConfigError(manifest, "", error.strerror or str(error)) from None
    _check_name(manifest, "suite.name", table.suite.name)
    folder = manifest.resolve().parent.name
    if table.suite.name != folder:
        raise ConfigError(
            manifest, "suite.name", f"is {table.suite.name!r}, expected {folder!r} as the folder is called"
        )
    _check_known(manifest, "suite.precisions", table.suite.precisions, PRECISIONS)
    _check_known(manifest, "suite.tolerance", table.suite.tolerance, PRECISIONS)
    _check_known(manifest, "suite.backends", table.suite.backends, BACKEND_PRECISIONS)
    cases = [_case(manifest, table.suite, name, case) for name, case in table.case.items()]
    for include in table.include:
        cases += _included(manifest, table.suite, include, including)
    if not cases:
        raise ConfigError(manifest, "case", "the suite has no case: add a [case.NAME] table")
    twice = {case.name for case in cases if sum(other.name == case.name for other in cases) > 1}
    if twice:
        raise ConfigError(manifest, "include", f"cases come twice: {', '.join(sorted(twice))}")
    return Suite(table.suite.name, table.suite.description, table.suite.backends, tuple(cases), str(manifest))


def _check_name(manifest: Path, key: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(manifest, key, f"{name!r} is not a name: lower-case letters, digits and _, at most 64")


def _check_known(manifest: Path, key: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(manifest, key, f"{name!r} is none of {', '.join(known)}")


def _case(manifest: Path, suite: _SuiteTable, name: str, table: _CaseTable) -> Case:
    key = f"case.{name}"
    _check_name(manifest, key, name)
    if not _FACTORY.fullmatch(table.module):
        raise ConfigError(manifest, f"{key}.module", f"{table.module!r} is not 'package.module:Class'")
    if not table.inputs:
        raise ConfigError(manifest, f"{key}.inputs", "at least one input is needed")
    if any(size < 1 for spec in table.inputs for size in spec.shape):
        raise ConfigError(manifest, f"{key}.inputs", "every dimension is at least 1")
    if table.samples < 1:
        raise ConfigError(manifest, f"{key}.samples", "is at least 1")
    _check_known(manifest, f"{key}.precisions", table.precisions, PRECISIONS)
    _check_known(manifest, f"{key}.tolerance", table.tolerance, PRECISIONS)
    for issue in table.known_issues:
        _check_known(manifest, f"{key}.known_issues.precisions", issue.precisions, PRECISIONS)
        _check_known(manifest, f"{key}.known_issues.socs", issue.socs, load_socs())
        _check_known(manifest, f"{key}.known_issues.backends", issue.backends, BACKEND_PRECISIONS)
    return Case(
        suite=suite.name,
        name=name,
        module=table.module,
        inputs=table.inputs,
        args=table.args,
        kwargs=table.kwargs,
        seed=table.seed,
        samples=table.samples,
        precisions=table.precisions or suite.precisions,
        tolerances={**suite.tolerance, **table.tolerance},
        known_issues=tuple(_placed(issue, suite.backends) for issue in table.known_issues),
        folder=str(manifest.parent.resolve()),
    )


def _placed(issue: KnownIssue, backends: tuple[str, ...]) -> KnownIssue:
    if issue.precisions and _CPU_PRECISIONS.issuperset(issue.precisions):
        backends = CPU_BACKENDS
    return msgspec.structs.replace(issue, backends=issue.backends or backends)


def _included(manifest: Path, suite: _SuiteTable, include: _Include, including: tuple[Path, ...]) -> list[Case]:
    path = manifest.resolve().parent.parent / include.suite / "suite.toml"
    if path in (*including, manifest.resolve()):
        raise ConfigError(manifest, "include.suite", f"{include.suite!r} includes this suite: that never ends")
    source = load_suite(path, (*including, manifest.resolve()))
    by_name = {case.name: case for case in source.cases}
    taken = []
    for name in include.cases:
        if name not in by_name:
            raise ConfigError(manifest, "include.cases", str(UnknownNameError("case", name, by_name)))
        precisions = include.precisions or by_name[name].precisions
        taken.append(msgspec.structs.replace(by_name[name], suite=suite.name, precisions=precisions))
    return taken


def find_suites(folders: Sequence[Path] = ()) -> dict[str, Path]:
    """Return the manifests by folder name: the ones farm ships, then those in `folders`.

    A folder is a suite (it has a suite.toml) or holds suites. Raises ConfigError for one that is neither.
    """
    found = {path.parent.name: path for path in sorted(data_folder("test_suites").glob("*/suite.toml"))}
    for folder in folders:
        own = folder / "suite.toml"
        manifests = [own] if own.is_file() else sorted(folder.glob("*/suite.toml"))
        if not manifests:
            raise ConfigError(folder, "", "is no suite and holds none: a suite is a folder with a suite.toml")
        for path in manifests:
            name = path.parent.resolve().name
            if name in found and found[name].resolve() != path.resolve():
                raise ConfigError(
                    path, "", f"there is a suite {name!r} already, {found[name]}: call this one differently"
                )
            found[name] = path
    return found


def resolve_suite(name: str, known: Mapping[str, Path]) -> Suite:
    """Return the suite called `name`, or the one in the folder or manifest that `name` is a path to."""
    path = Path(name)
    if "/" in name or name.endswith(".toml"):
        return load_suite(path / "suite.toml" if path.is_dir() else path)
    if name not in known:
        raise UnknownNameError("suite", name, known, "(farm suites lists them)")
    return load_suite(known[name])


def plan(
    suites: Sequence[Suite],
    socs: Sequence[Soc],
    backend: str,
    precisions: Sequence[str] = (),
    option_sets: Sequence[OptionSet] = ((),),
) -> tuple[Job, ...]:
    """Return suites x targets as jobs, in the order of the manifests. Pure.

    Every one of `option_sets` makes targets of its own, and the jobs of one set stand together: a runner's process has
    one set.

    `precisions` narrows what the cases run at; none of it is skipped silently: a precision that no case has or
    that `backend` does not run, or a backend that a suite or an SoC does not have, raises. On a CPU backend every case
    runs, whatever its manifest declares.
    """
    for soc, precision in itertools.product(socs, precisions):
        if precision in PRECISIONS:
            check_target(soc, backend, precision)
    jobs = []
    for soc, options, suite in itertools.product(socs, option_sets, suites):
        for case in suite.cases:
            for precision in case.precisions_on(backend):
                if not precisions or precision in precisions:
                    check_target(soc, backend, precision)
                    jobs.append(Job(case, Target(soc.name, backend, precision, options)))
    _check_suites(suites, backend)
    declared = {precision for suite in suites for case in suite.cases for precision in case.precisions_on(backend)}
    for precision in precisions:
        if precision not in declared:
            raise UnknownNameError("precision", precision, declared, "in the chosen suites")
    return tuple(jobs)


def _check_suites(suites: Sequence[Suite], backend: str) -> None:
    for suite in suites:
        legal = tuple(dict.fromkeys((*suite.backends, *CPU_BACKENDS)))
        if backend not in legal:
            raise IllegalTargetError(
                f"suite {suite.name} is not made for the {backend} backend: it is for {', '.join(legal)}"
            )
        if not any(case.precisions_on(backend) for case in suite.cases):
            raise IllegalTargetError(
                f"suite {suite.name} has no precision for the {backend} backend: its cases declare what only "
                f"{', '.join(CPU_BACKENDS)} runs"
            )
