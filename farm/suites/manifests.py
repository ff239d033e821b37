"""test_suites/*/suite.toml -> Suite and Case: reading manifests, and finding them."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

import msgspec

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, cpu_backends
from farm.base.errors import ConfigError, UnknownNameError, UsageError
from farm.base.paths import is_suite_path, require_inside
from farm.base.resources import data_folder
from farm.base.socs import PRECISIONS, READY, load_socs
from farm.base.toml_tables import read_table
from farm.suites.features import Features
from farm.suites.figures import FIGURES, REFERENCES
from farm.suites.generate import Generate
from farm.suites.generate_tables import check_alone, check_expected, checked
from farm.suites.input_tables import check_inputs
from farm.suites.state import State, state_problem
from farm.suites.suite import (
    FORWARD,
    Case,
    Expectation,
    InputSpec,
    KnownIssue,
    MethodInputs,
    Metric,
    Suite,
    Tolerance,
    cpu_precisions,
)

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


class _CaseTable(_Table, frozen=True):
    inputs: tuple[InputSpec, ...] = ()
    module: str = ""
    checkpoint: str = ""
    program: str = ""
    pte: str = ""
    expected: tuple[tuple[str, ...], ...] = ()
    compiled_with: dict[str, str] = {}
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    seed: int = 0
    samples: int = 1
    precisions: tuple[str, ...] = ()
    tolerance: dict[str, Tolerance] = {}
    known_issues: tuple[KnownIssue, ...] = ()
    expect: tuple[Expectation, ...] = ()
    metrics: tuple[Metric, ...] = ()
    deterministic: bool | None = None
    method: str = FORWARD
    methods: dict[str, MethodInputs] = {}
    features: Features = Features()
    state: tuple[State, ...] = ()
    generate: Generate | None = None

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
    _check_name(manifest, "suite.name", table.suite.name)
    folder = manifest.resolve().parent.name if files is None else manifest.stem
    if table.suite.name != folder:
        raise ConfigError(
            manifest, "suite.name", f"is {table.suite.name!r}, expected {folder!r} as the folder is called"
        )
    _check_known(manifest, "suite.precisions", table.suite.precisions, PRECISIONS)
    _check_known(manifest, "suite.tolerance", table.suite.tolerance, PRECISIONS)
    _check_limits(manifest, "suite.tolerance", table.suite.tolerance)
    _check_known(manifest, "suite.backends", table.suite.backends, BACKENDS)
    _check_misspelt(manifest, table.case)
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


def suite_name(folder: Path) -> str:
    """Return the name of the suite that `folder` is to become. Raises UsageError where it cannot be one."""
    if not _NAME.fullmatch(folder.absolute().name):
        raise UsageError(f"{folder.name!r} is to be a suite's name: lower-case letters, digits and _, at most 64")
    return folder.absolute().name


def _check_name(manifest: Path, key: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(manifest, key, f"{name!r} is not a name: lower-case letters, digits and _, at most 64")


def _check_known(manifest: Path, key: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(manifest, key, f"{name!r} is none of {', '.join(known)}")


def _check_misspelt(manifest: Path, cases: Mapping[str, _CaseTable]) -> None:
    """Raise ConfigError for what adds to a case of another name: `[case.stm.tolerance.8a8w]`."""
    runs = {"inputs", "module", "program", "pte", "generate"}
    whole = {name for name, case in cases.items() if case.given & runs}
    for name in cases:
        if name not in whole and whole:
            problem = f"has neither inputs nor anything to run: {UnknownNameError('case', name, whole)}"
            raise ConfigError(manifest, f"case.{name}", problem)


def _check_limits(manifest: Path, key: str, tolerances: Mapping[str, Tolerance]) -> None:
    for (precision, tolerance), reference in itertools.product(tolerances.items(), REFERENCES):
        for name, limit in msgspec.structs.asdict(getattr(tolerance, reference)).items():
            if limit is not None and (problem := FIGURES[name].limit_problem(limit)):
                raise ConfigError(manifest, f"{key}.{precision}.{reference}.{name}", problem)


def _case(manifest: Path, folder: str, suite: _SuiteTable, name: str, table: _CaseTable, inside: Path | None) -> Case:
    key = f"case.{name}"
    _check_keys(manifest, key, name, table)
    if table.generate is not None:
        check_alone(manifest, key, table.given)
    else:
        _check_module(manifest, key, table)
    if problem := table.features.problem:
        raise ConfigError(manifest, f"{key}.features", problem)
    _check_known(manifest, f"{key}.precisions", table.precisions, PRECISIONS)
    _check_known(manifest, f"{key}.tolerance", table.tolerance, PRECISIONS)
    _check_limits(manifest, f"{key}.tolerance", table.tolerance)
    for issue in table.known_issues:
        _check_known(manifest, f"{key}.known_issues.precisions", issue.precisions, PRECISIONS)
        _check_known(manifest, f"{key}.known_issues.socs", issue.socs, load_socs())
        _check_known(manifest, f"{key}.known_issues.backends", issue.backends, BACKENDS)
        if issue.virtual and issue.stage == "build":
            problem = "a build is for devices of any kind: leave virtual out, or name another stage"
            raise ConfigError(manifest, f"{key}.known_issues.virtual", problem)
    on_request = [figure.name for figure in FIGURES.values() if figure.on_request]
    _check_known(manifest, f"{key}.metrics", (metric.name for metric in table.metrics), on_request)
    for index, metric in enumerate(table.metrics):
        if metric.least is not None and (problem := FIGURES[metric.name].limit_problem(metric.least)):
            raise ConfigError(manifest, f"{key}.metrics[{index}].least", problem)
    every_expected = (*table.expect, *([suite.expect] if suite.expect else []))
    for expected in every_expected:
        _check_known(manifest, f"{key}.expect.precisions", expected.precisions, PRECISIONS)
        _check_known(manifest, f"{key}.expect.socs", expected.socs, load_socs())
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
        return msgspec.structs.replace(case, samples=checked(manifest, key, case, inside))
    return case


def _check_keys(manifest: Path, key: str, name: str, table: _CaseTable) -> None:
    _check_name(manifest, key, name)
    if table.samples < 1:
        raise ConfigError(manifest, f"{key}.samples", "is at least 1")
    if table.compiled_with and not table.pte:
        raise ConfigError(manifest, f"{key}.compiled_with", "is for a pte alone: what is compiled here is known")
    if table.pte and not (table.module or table.program or table.expected):
        for limit in sorted({"metrics", "tolerance"} & table.given):
            problem = "nothing says what the outputs of the pte should be: give it expected, a module or a program"
            raise ConfigError(manifest, f"{key}.{limit}", f"{problem}; without {limit} its run alone is judged")


def _check_module(manifest: Path, key: str, table: _CaseTable) -> None:
    """Raise ConfigError unless module and inputs are unambiguous."""
    _check_source(manifest, key, table)
    for place, values in ((f"{key}.args", table.args), (f"{key}.kwargs", table.kwargs)):
        _check_value(manifest, place, values)
    check_inputs(manifest, f"{key}.inputs", table.inputs, table.samples, ready=bool(table.pte))
    _check_methods(manifest, key, table)
    check_expected(manifest, f"{key}.expect", table.expect)
    if problem := state_problem(table.state, len(table.inputs), table.samples):
        raise ConfigError(manifest, f"{key}.state", problem)


def _check_source(manifest: Path, key: str, table: _CaseTable) -> None:
    """Raise ConfigError unless it is clear where the program and its references come from."""
    if table.module and not _FACTORY.fullmatch(table.module):
        raise ConfigError(manifest, f"{key}.module", f"{table.module!r} is not 'package.module:Class'")
    if table.module and table.program:
        raise ConfigError(manifest, f"{key}.program", "there is a module as well: leave one of them out")
    if not (table.module or table.program or table.pte):
        raise ConfigError(manifest, key, "says nothing of what to run: give it a module, a program or a pte")
    if not table.module and (table.checkpoint or table.args or table.kwargs):
        raise ConfigError(manifest, key, "checkpoint, args and kwargs are for a module, which is missing")
    if READY in table.precisions and not table.pte:
        raise ConfigError(manifest, f"{key}.precisions", f"{READY!r} is for a pte alone")
    if not table.expected:
        return
    if not table.pte or table.module or table.program:
        raise ConfigError(manifest, f"{key}.expected", "is for a pte that has neither module nor program beside it")
    if len(table.expected) != table.samples:
        raise ConfigError(
            manifest, f"{key}.expected", f"is for {len(table.expected)} samples, expected {table.samples}"
        )


def _check_value(manifest: Path, key: str, value: object, depth: int = 0) -> None:
    """Raise ConfigError unless `value`, an argument of a module, reaches a builder as it is written."""
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
        expected = "a string, a finite number, a boolean, or a list or table of these"
        raise ConfigError(manifest, key, f"{what}, expected {expected}")
    if isinstance(value, dict):
        for name, one in value.items():
            _check_value(manifest, f"{key}.{name}", one, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            _check_value(manifest, f"{key}[{index}]", one, depth + 1)


def _check_methods(manifest: Path, key: str, table: _CaseTable) -> None:
    """Raise ConfigError unless the methods belong to a module and the features fit each other."""
    for name in (table.method, *table.methods):
        if not _METHOD.fullmatch(name):
            raise ConfigError(manifest, f"{key}.method", f"{name[:80]!r} is no name of a method")
    if table.methods and table.method not in table.methods:
        raise ConfigError(manifest, f"{key}.method", str(UnknownNameError("method", table.method, table.methods)))
    if table.pte and (table.methods or table.features.named):
        raise ConfigError(manifest, key, "methods and features are for what is compiled: a pte is that already")
    if table.program and not table.pte and (table.methods or table.method != FORWARD):
        raise ConfigError(manifest, f"{key}.method", "an exported program has one method, forward: leave it out")
    for name, method in table.methods.items():
        if method.inputs:
            check_inputs(manifest, f"{key}.methods.{name}.inputs", method.inputs, table.samples, ready=bool(table.pte))
    if table.methods.get(table.method, MethodInputs()).inputs:
        problem = "the method that is executed takes the inputs of the case: leave these out"
        raise ConfigError(manifest, f"{key}.methods.{table.method}.inputs", problem)
    if table.features.dump_intermediate_outputs and len(table.methods) > 1:
        problem = "ExecuTorch writes the layers of one method: leave the others out"
        raise ConfigError(manifest, f"{key}.features.dump_intermediate_outputs", problem)


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
    _check_name(manifest, "include.suite", include.suite)
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
    _check_known(manifest, "include.precisions", include.precisions, PRECISIONS)
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
