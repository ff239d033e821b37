"""test_suites/*/suite.toml -> Suite and Case: reading manifests, and finding them."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path

import msgspec

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, cpu_backends
from farm.base.errors import ConfigError, UnknownNameError
from farm.base.paths import data_folder, is_suite_path, require_inside
from farm.base.socs import PRECISIONS, READY, load_socs
from farm.base.toml_tables import read_table
from farm.suites.figures import FIGURES, REFERENCES
from farm.suites.generate_tables import expected_problems, foreign_problems, generate_problems, sample_count
from farm.suites.suite import (
    FORWARD,
    Case,
    CaseFields,
    Expectation,
    InputSpec,
    KnownIssue,
    MethodInputs,
    Suite,
    Tolerance,
    cpu_precisions,
    state_problem,
)

Problems = Iterator[tuple[str, str]]
"""Wrong keys and their problems; the first one is reported."""

# Parameters of an input by distribution.
_DRAWN_WITH = {
    "normal": ("scale",),
    "uniform": ("low", "high"),
    "integers": ("low", "high"),
    "linspace": ("low", "high"),
    "arange": (),
    "constant": ("low",),
}


def input_problems(key: str, inputs: Sequence[InputSpec], samples: int, *, ready: bool) -> Problems:
    """Yield the problems of inputs that cannot be made for each sample; `ready` for inputs of a `.pte`."""
    if not inputs:
        yield key, "at least one input is needed"
    for index, spec in enumerate(inputs):
        yield from _drawn_problems(f"{key}[{index}]", spec)
        if spec.shape is None and not spec.files:
            yield key, "an input has a shape or files"
        if any(size < 1 for size in spec.shape or ()):
            yield key, "every dimension is at least 1"
        if spec.files and len(spec.files) != samples:
            yield f"{key}.files", f"are {len(spec.files)}, expected one a sample"
        for size in spec.dynamic:
            if spec.shape is None or not 0 <= size.dim < len(spec.shape):
                yield f"{key}.dynamic", f"the shape has no dimension {size.dim}"
            elif not 1 <= size.least <= spec.shape[size.dim] <= size.greatest:
                problem = f"dimension {size.dim} is {spec.shape[size.dim]}, expected 1 <= least <= it <= greatest"
                yield f"{key}.dynamic", problem
    if ready and any(spec.dynamic for spec in inputs):
        yield f"{key}.dynamic", "a pte knows its bounds: leave it out"


def _drawn_problems(key: str, spec: InputSpec) -> Problems:
    """Yield the reasons why `spec` cannot be drawn."""
    usual, drawn = InputSpec(), f"the distribution {spec.distribution!r}"
    for name in ("low", "high", "scale"):
        value = getattr(spec, name)
        if value != getattr(usual, name) and name not in _DRAWN_WITH[spec.distribution]:
            takes = " and ".join(_DRAWN_WITH[spec.distribution]) or "neither low, high nor scale"
            yield f"{key}.{name}", f"{drawn} takes {takes}: leave it out"
        if not math.isfinite(value):
            yield f"{key}.{name}", f"is {value}, expected a finite number"
    if spec.scale < 0:
        yield f"{key}.scale", f"is {spec.scale:g}, expected at least 0"
    if spec.distribution == "uniform" and spec.low > spec.high:
        yield f"{key}.low", f"is {spec.low:g}, expected at most high, {spec.high:g}"
    if spec.distribution == "integers" and int(spec.low) >= int(spec.high):
        yield f"{key}.low", f"is {spec.low:g}, expected a whole number below high, {spec.high:g}"


_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")
_METHOD = re.compile(r"[A-Za-z_]\w{0,63}")
_FACTORY = re.compile(r"\.{0,2}[A-Za-z_][\w.]*:[A-Za-z_]\w*")

# Limits of a module's arguments: JSON, which carries them to the builder, has only these integers.
_MOST_NESTED = 32
_LEAST_INT, _GREATEST_INT = -(2**63), 2**64 - 1
_MOST_FOREIGN_BYTES = 1 << 20
"""Largest manifest of another user: a parser of TOML takes a second for it."""

# Tables of a manifest; defaults of its [suite] table complete its cases.


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class _CaseTable(CaseFields, frozen=True):
    inputs: tuple[InputSpec, ...] = ()
    module: str = ""
    tolerance: dict[str, Tolerance] = msgspec.field(default_factory=dict)

    @property
    def given(self) -> set[str]:
        """Keys whose value differs from the default."""
        usual = _CaseTable()
        return {name for name in self.__struct_fields__ if getattr(self, name) != getattr(usual, name)}


class _SuiteTable(_Table, frozen=True):
    name: str
    description: str
    backends: tuple[str, ...] = (DEFAULT_BACKEND,)
    precisions: tuple[str, ...] = ("8a8w",)
    tolerance: dict[str, Tolerance] = {}
    expect: Expectation | None = None


class _Include(_Table, frozen=True):
    suite: str
    cases: tuple[str, ...] = ()
    """Empty is all of them."""
    without: dict[str, str] = {}
    """Cases that are left out, and why."""
    precisions: tuple[str, ...] = ()


class _SuiteManifest(_Table, frozen=True):
    suite: _SuiteTable
    case: dict[str, _CaseTable] = {}
    include: tuple[_Include, ...] = ()
    """Cases taken from a suite in a sibling folder, under their own names."""


def load_suite(
    manifest: Path,
    including: tuple[Path, ...] = (),
    files: Path | None = None,
    inside: Path | None = None,
    read: dict[tuple[Path, Path | None], Suite] | None = None,
) -> Suite:
    """Read one suite.toml. Raises ConfigError, naming file and key, for anything it cannot mean.

    `including` are the manifests that brought us here. `files`: the folder of the files of a template, of which cases
    without their files are left out. `inside`: the folder of all files of a foreign suite; a name that leads out of it
    is refused before its file is looked up. `read` are suites that other includes have read.
    """
    read = {} if read is None else read
    try:
        if inside is not None and manifest.stat().st_size > _MOST_FOREIGN_BYTES:
            raise ConfigError(manifest, "", f"is larger than {_MOST_FOREIGN_BYTES} bytes: make several suites")
        table = read_table(manifest, _SuiteManifest)
    except OSError as error:
        raise ConfigError(manifest, "", error.strerror or str(error)) from None
    except RecursionError:
        problem = f"lists or tables are nested too deeply to be read, expected at most {_MOST_NESTED} in one another"
        raise ConfigError(manifest, "", problem) from None
    folder = manifest.resolve().parent.name if files is None else manifest.stem
    _refuse(manifest, "", _suite_problems(table, folder))
    place = files or manifest.parent.resolve()
    there = {name: case for name, case in table.case.items() if files is None or _has_files(case, files)}
    cases = [_case(manifest, str(place), table.suite, name, case, inside) for name, case in there.items()]
    for include in table.include:
        cases += _included(manifest, table.suite, include, including, inside, read)
    if not cases:
        missing = f"no case has its files in {files}" if files else "the suite has no case: add a [case.NAME] table"
        raise ConfigError(manifest, "case", missing)
    if twice := [name for name, count in Counter(case.name for case in cases).items() if count > 1]:
        raise ConfigError(manifest, "include", f"cases come twice: {', '.join(sorted(twice))}")
    return Suite(table.suite.name, table.suite.description, table.suite.backends, tuple(cases), str(manifest))


def _has_files(case: _CaseTable, folder: Path) -> bool:
    return case.generate is None or all((folder / name).exists() for name in case.generate.files)


def _refuse(manifest: Path, key: str, problems: Problems) -> None:
    """Raise ConfigError for the first of `problems` below `key`: later ones may follow from it."""
    for below, problem in problems:
        raise ConfigError(manifest, ".".join(filter(None, (key, below))), problem)


def _suite_problems(table: _SuiteManifest, folder: str) -> Problems:
    suite = table.suite
    yield from _name_problems("suite.name", suite.name)
    if suite.name != folder:
        yield "suite.name", f"is {suite.name!r}, expected {folder!r} as the folder is called"
    yield from _unknown("suite.precisions", suite.precisions, PRECISIONS)
    yield from _tolerance_problems("suite.tolerance", suite.tolerance)
    yield from _unknown("suite.backends", suite.backends, BACKENDS)
    # A table may add to a case of another name: `[case.stm.tolerance.8a8w]`.
    runs = {"inputs", "module", "program", "pte", "generate"}
    whole = {name for name, case in table.case.items() if case.given & runs}
    for name in table.case:
        if name not in whole and whole:
            yield f"case.{name}", f"has neither inputs nor anything to run: {UnknownNameError('case', name, whole)}"


def _name_problems(key: str, name: str) -> Problems:
    if not _NAME.fullmatch(name):
        yield key, f"{name!r} is not a name: lower-case letters, digits and _, at most 64"


def _unknown(key: str, names: Iterable[str], known: Collection[str]) -> Problems:
    for name in names:
        if name not in known:
            yield key, f"{name!r} is none of {', '.join(known)}"


def _tolerance_problems(key: str, tolerances: Mapping[str, Tolerance]) -> Problems:
    yield from _unknown(key, tolerances, PRECISIONS)
    for (precision, tolerance), reference in itertools.product(tolerances.items(), REFERENCES):
        for name, limit in msgspec.structs.asdict(getattr(tolerance, reference)).items():
            if limit is not None and (problem := FIGURES[name].limit_problem(limit)):
                yield f"{key}.{precision}.{reference}.{name}", problem


def _case(manifest: Path, folder: str, suite: _SuiteTable, name: str, table: _CaseTable, inside: Path | None) -> Case:
    key = f"case.{name}"
    every_expected = (*table.expect, *([suite.expect] if suite.expect else []))
    _refuse(manifest, key, _case_problems(name, table, every_expected))
    given = {name: getattr(table, name) for name in _CaseTable.__struct_fields__ if name in Case.__struct_fields__}
    filled_in = {
        "precisions": table.precisions or ((READY,) if table.pte else suite.precisions),
        "tolerances": {**suite.tolerance, **table.tolerance},
        "known_issues": tuple(_placed(issue, suite.backends) for issue in table.known_issues),
        "expect": every_expected,
    }
    case = Case(suite=suite.name, name=name, folder=folder, **{**given, **filled_in})
    folders = case.generate.folders if case.generate is not None else ()
    for file in case.files:
        require_inside(manifest, key, Path(folder, file), inside)
        if file not in folders and not Path(case.folder, file).is_file():
            raise ConfigError(manifest, key, f"{file!r} is no file; it is looked for in {case.folder}")
    if case.generate is not None:
        _refuse(manifest, key, generate_problems(case, inside))
        return msgspec.structs.replace(case, samples=sample_count(case))
    return case


def _case_problems(name: str, table: _CaseTable, every_expected: Sequence[Expectation]) -> Problems:
    """Yield keys of the case and their problems, so that program and inputs are unambiguous without one."""
    yield from _name_problems("", name)
    if table.samples < 1:
        yield "samples", "is at least 1"
    if table.compiled_with and not table.pte:
        yield "compiled_with", "is for a pte alone: facts of compiled cases are known"
    if table.pte and not (table.module or table.program or table.expected):
        for limit in sorted({"metrics", "tolerance"} & table.given):
            problem = "there is no reference for the outputs of the pte: give expected, a module or a program"
            yield limit, f"{problem}; without {limit} its run alone is judged"
    if table.generate is not None:
        yield from foreign_problems(table.given)
    else:
        yield from _source_problems(table)
        yield from _value_problems("args", table.args)
        yield from _value_problems("kwargs", table.kwargs)
        yield from input_problems("inputs", table.inputs, table.samples, ready=bool(table.pte))
        yield from _method_problems(table)
        yield from expected_problems(table.expect)
        if problem := state_problem(table.state, len(table.inputs), table.samples):
            yield "state", problem
    if problem := table.features.problem:
        yield "features", problem
    yield from _unknown("precisions", table.precisions, PRECISIONS)
    yield from _tolerance_problems("tolerance", table.tolerance)
    for issue in table.known_issues:
        yield from _issue_problems("known_issues", issue)
    on_request = [figure.name for figure in FIGURES.values() if figure.on_request]
    yield from _unknown("metrics", (metric.name for metric in table.metrics), on_request)
    for index, metric in enumerate(table.metrics):
        if metric.least is not None and (problem := FIGURES[metric.name].limit_problem(metric.least)):
            yield f"metrics[{index}].least", problem
    for expected in every_expected:
        yield from _unknown("expect.precisions", expected.precisions, PRECISIONS)
        yield from _unknown("expect.socs", expected.socs, load_socs())


def _issue_problems(key: str, issue: KnownIssue) -> Problems:
    yield from _unknown(f"{key}.precisions", issue.precisions, PRECISIONS)
    yield from _unknown(f"{key}.socs", issue.socs, load_socs())
    yield from _unknown(f"{key}.backends", issue.backends, BACKENDS)
    if issue.virtual and issue.stage == "build":
        yield f"{key}.virtual", "a build is for devices of any kind: leave virtual out, or name another stage"


def _source_problems(table: _CaseTable) -> Problems:
    """Yield what leaves unclear where the program and its references come from."""
    if table.module and not _FACTORY.fullmatch(table.module):
        yield "module", f"{table.module!r} is not 'package.module:Class'"
    if table.module and table.program:
        yield "program", "there is a module as well: leave one of them out"
    if not (table.module or table.program or table.pte):
        yield "", "has nothing to run: give a module, a program or a pte"
    if not table.module and (table.checkpoint or table.args or table.kwargs):
        yield "", "checkpoint, args and kwargs are for a module, which is missing"
    if READY in table.precisions and not table.pte:
        yield "precisions", f"{READY!r} is for a pte alone"
    if table.expected and (not table.pte or table.module or table.program):
        yield "expected", "is for a pte that has neither module nor program beside it"
    if table.expected and len(table.expected) != table.samples:
        yield "expected", f"is for {len(table.expected)} samples, expected {table.samples}"


def _value_problems(key: str, value: object, depth: int = 0) -> Problems:
    """Yield the problems of a `value`, an argument of a module, that does not reach a builder as it is written."""
    what = ""
    if depth > _MOST_NESTED:
        what = f"is nested more than {_MOST_NESTED} deep"
    elif isinstance(value, (date, time)):  # a datetime is a date
        what = f"is the date or time {value}"
    elif isinstance(value, float) and not math.isfinite(value):
        what = f"is {value}"
    elif isinstance(value, int) and not _LEAST_INT <= value <= _GREATEST_INT:
        what = f"is {value:#x}, more than 64 bits"
    if what:
        yield key, f"{what}, expected a string, a finite number, a boolean, or a list or table of these"
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _value_problems(f"{key}.{name}", one, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _value_problems(f"{key}[{index}]", one, depth + 1)


def _method_problems(table: _CaseTable) -> Problems:
    """Yield methods without a module, and features that do not fit each other."""
    for name in (table.method, *table.methods):
        if not _METHOD.fullmatch(name):
            yield "method", f"{name[:80]!r} is no name of a method"
    if table.methods and table.method not in table.methods:
        yield "method", str(UnknownNameError("method", table.method, table.methods))
    if table.pte and (table.methods or table.features.named):
        yield "", "methods and features are for compiled cases, and a pte is compiled already"
    if table.program and not table.pte and (table.methods or table.method != FORWARD):
        yield "method", "an exported program has one method, forward: leave it out"
    for name, method in table.methods.items():
        if method.inputs:
            yield from input_problems(f"methods.{name}.inputs", method.inputs, table.samples, ready=bool(table.pte))
    if table.methods.get(table.method, MethodInputs()).inputs:
        problem = "the method that is executed takes the inputs of the case: leave these out"
        yield f"methods.{table.method}.inputs", problem
    if table.features.dump_intermediate_outputs and len(table.methods) > 1:
        yield "features.dump_intermediate_outputs", "ExecuTorch writes the layers of one method: leave the others out"


def _placed(issue: KnownIssue, backends: tuple[str, ...]) -> KnownIssue:
    if issue.precisions and cpu_precisions().issuperset(issue.precisions):
        backends = cpu_backends()
    return msgspec.structs.replace(issue, backends=issue.backends or backends)


def _included(
    manifest: Path,
    suite: _SuiteTable,
    include: _Include,
    including: tuple[Path, ...],
    inside: Path | None,
    read: dict[tuple[Path, Path | None], Suite],
) -> list[Case]:
    _refuse(manifest, "include.suite", _name_problems("", include.suite))
    path, files = manifest.resolve().parent.parent / include.suite / "suite.toml", None
    template = data_folder("test_suites") / f"{include.suite}.toml"
    if not path.is_file() and template.is_file():
        path, files = template, manifest.resolve().parent
    if path in (*including, manifest.resolve()):
        raise ConfigError(manifest, "include.suite", f"{include.suite!r} includes this suite: that never ends")
    # Suites that include each other twice would be read twice as often with each level.
    if (path, files) not in read:
        read[path, files] = load_suite(path, (*including, manifest.resolve()), files, inside, read)
    source = read[path, files]
    by_name = {case.name: case for case in source.cases}
    for name in (*include.cases, *include.without):
        if name not in by_name:
            hint = f"(it has cases whose files are in {files})" if files else ""
            raise ConfigError(manifest, "include.cases", str(UnknownNameError("case", name, by_name, hint)))
    _refuse(manifest, "include.precisions", _unknown("", include.precisions, PRECISIONS))
    return [
        msgspec.structs.replace(
            by_name[name],
            suite=suite.name,
            precisions=include.precisions or by_name[name].precisions,
            tolerances={**suite.tolerance, **by_name[name].tolerances},
            expect=(*by_name[name].expect, *([suite.expect] if suite.expect else [])),
        )
        for name in include.cases or by_name
        if name not in include.without
    ]


def find_suites(folders: Sequence[Path] = ()) -> dict[str, Path]:
    """Return the manifests by folder name: the ones farm ships, then those in `folders`.

    A folder is a suite (it has a suite.toml) or holds suites. Raises ConfigError for another folder.
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
    if is_suite_path(name):
        return load_suite(path / "suite.toml" if path.is_dir() else path)
    if name not in known:
        raise UnknownNameError("suite", name, known, "(farm suites lists them)")
    return load_suite(known[name])
