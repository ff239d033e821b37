"""Suites, cases, targets and jobs; compiler features of a case, and its state between inferences. Torch-free."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import BACKENDS, cpu_backends, runs_on_cpu
from farm.base.errors import ConfigError, IllegalTargetError, UnknownNameError
from farm.base.socs import PRECISIONS, READY, Soc, check_target
from farm.suites.figures import figure_fields
from farm.suites.generate import Generate, require_for_text

# Features of a QNN backend that a case requires beyond operators: compiler settings and device requirements.


_HEXAGON = re.compile(r"v\d{2,3}")


class OpPackage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operator of the user's own in a package of QNN's: ExecuTorch 1.5, `QnnExecuTorchOpPackageInfo`."""

    name: str
    """Name of the package."""
    operator: str
    """As torch calls it: `my_ops.mul3.default`."""
    qnn_operator: str
    """As the package calls it."""
    interface_provider: str
    library: str
    """Library for x86_64 (`.so`), used by the compiler and by virtual devices; relative to the folder of the suite."""
    android: str = ""
    """For the processor of an Android device."""
    hexagon: dict[str, str] = {}
    """For the DSP of one, by its architecture: `v75`."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Return all that it names."""
        return tuple(filter(None, (self.library, self.android, *self.hexagon.values())))

    @property
    def problem(self) -> str:
        """Return what of it cannot be; "" where all can."""
        if wrong := [name for name in self.hexagon if not _HEXAGON.fullmatch(name)]:
            return f"hexagon.{wrong[0][:20]} is no architecture: name the DSP's as in hexagon.v75"
        if bool(self.android) != bool(self.hexagon):
            there, missing = ("android", "hexagon.v75") if self.android else ("hexagon", "android")
            return f"an Android device needs two libraries of a package: beside {there} there is no {missing}"
        return ""


class Features(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Features by their names in ExecuTorch's compiler, with the defaults for ordinary cases."""

    online_prepare: bool = False
    """The device makes the graph when it loads the program."""
    shared_buffer: bool = False
    """Inputs and outputs are in memory that the DSP shares (rpcmem), on a simulator in ordinary memory: no memory is
    planned for them."""
    dump_intermediate_outputs: bool = False
    """The program can write what every layer gives; it is executed so."""
    saver: bool = False
    """QNN's calls are recorded as well, into the folder `saver` of the bundle: docs of QNN's Saver backend."""
    use_multi_contexts: bool = False
    """Contexts of one program share their spill-fill buffer."""
    split: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    """Number of shares of the nodes, each in its own context; requires `use_multi_contexts`."""
    use_weight_sharing: bool = False
    """Weights that several methods have in common are stored once."""
    use_mha2sha: bool = False
    """Attention of many heads is taken apart into single heads."""
    skip_node_ops: tuple[str, ...] = ()
    """Operators that are left to the CPU: `aten.add.Tensor`."""
    skip_node_ids: tuple[str, ...] = ()
    """Nodes that are left to the CPU, by their names in the lowered graph: `aten_add_tensor`."""
    op_packages: tuple[OpPackage, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        """Return the names of the required features."""
        usual = Features()
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) != getattr(usual, name))

    @property
    def problem(self) -> str:
        """Return the conflict between features; "" for none. ExecuTorch 1.5 reports it late or never."""
        if self.split and not self.use_multi_contexts:
            return "split makes several contexts, which want use_multi_contexts = true"
        if self.split == 1:
            return "split is 1, expected 2 or more, or 0 for one context"
        if self.online_prepare and self.use_multi_contexts:
            return "online_prepare makes one context on the device: leave use_multi_contexts out"
        if self.online_prepare and self.use_weight_sharing:
            return "online_prepare makes contexts on the device, which share no weights: leave use_weight_sharing out"
        return next((f"op_packages: {one.problem}" for one in self.op_packages if one.problem), "")


NOT_DIRECT = ("online_prepare", "shared_buffer", "dump_intermediate_outputs", "op_packages")
"""Features that direct mode's runner refuses, has no files for, or silently ignores (op packages; ExecuTorch 1.5)."""

# Missing parts of Qualcomm's simulator and this machine, by feature.
_ON_DEVICES_ALONE = {
    "online_prepare": "its graph is made by the device when it is loaded",
    "use_weight_sharing": "contexts that share weights are not simulated",
}


def why_on_device(names: tuple[str, ...]) -> str:
    """Return what of the features called `names` only a device has, as a reason; "" where a simulator has all."""
    return "; ".join(_ON_DEVICES_ALONE[name] for name in names if name in _ON_DEVICES_ALONE)


# Suites, cases, targets and jobs, and the state of a case between inferences. Torch-free.


# State of a case between inferences: an output that becomes an input. Torch-free, pure.


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


# Suite, Case, Target and Job, and the plan: every case on every target is a Job. Imports no torch, reads no file.


_LimitFields: Any = msgspec.defstruct("_LimitFields", figure_fields(), frozen=True, forbid_unknown_fields=True)


class Limits(_LimitFields):  # type: ignore[misc]
    """Limits for one output against one reference, by figure: farm/suites/figures.py.

    A limit that is None is measured but does not decide.
    """


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits against both references: the FP32 module, and the quantized module on the CPU."""

    fp32: Limits = Limits()
    quantized: Limits = Limits()


# Two ways of computing in float32 differ by its rounding: docs/reference/suites.md.
_DEFAULTS = {"fp32": Tolerance(fp32=Limits(sqnr_db=100.0, mismatch=0.0))}
# Defaults of text generation, from measurements: docs/guides/language_models.md. The least values of 16a8w were
# 59.0 dB, and 45.9 dB at the worst position; of 16a4w, without the first of these decoders, 57.4 and 45.9. A wrong
# element in a cache gives 37 and 23.
_GENERATE_DEFAULTS = {
    "16a8w": Tolerance(quantized=Limits(sqnr_db=55.0, worst_position_db=48.0)),
    "16a4w": Tolerance(quantized=Limits(sqnr_db=42.0, worst_position_db=34.0)),
    "16a4w_block": Tolerance(quantized=Limits(sqnr_db=42.0, worst_position_db=34.0)),
}


OptionSet = tuple[tuple[str, str], ...]
"""Run-time options of a target (`--option NAME=VALUE`) as pairs, sorted by name."""

DType = Literal["float32", "int32", "int64", "bool"]
Distribution = Literal["normal", "uniform", "integers", "arange", "linspace", "constant"]


def cpu_precisions() -> set[str]:
    """Return the precisions of CPU backends."""
    return {precision for name in cpu_backends() for precision in BACKENDS[name].precisions}


_Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Seed = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


class _Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class DynamicSize(_Frozen, frozen=True):
    """Dimension whose size is not fixed when compiling: the program takes any size from `least` to `greatest`."""

    dim: int
    greatest: int
    least: int = 1
    name: str = ""
    """Dimensions with the same name have the same size; a dimension without a name is independent."""


class InputSpec(_Frozen, frozen=True):
    """Input tensor from a seed or from files, equal on every machine."""

    shape: tuple[int, ...] | None = None
    """Executed shape; None only with `files`, whose shape counts."""
    files: tuple[str, ...] = ()
    """`.npy` files, one for each sample, relative to the folder of the suite; they replace random values."""
    dynamic: tuple[DynamicSize, ...] = ()
    dtype: DType = "float32"
    distribution: Distribution = "normal"
    low: float = -1.0
    """Lower bound of `uniform`, `integers` and `linspace`; the value of `constant`; the mean of `normal` is 0."""
    high: float = 1.0
    """Upper bound: included by `linspace`, excluded by `uniform` and `integers`."""
    scale: float = 1.0
    """Standard deviation of `normal`."""
    seed: _Seed = 0


class Expectation(_Frozen, frozen=True):
    """Required properties of a compiled case, such as the operators left to the CPU; any other value fails the job."""

    partitions: _Count = 1
    """Exact number of delegated partitions."""
    fallback_ops: dict[str, _Count] = {}
    """Exact number of each operator that is left to the CPU."""
    least_spill_fill_bytes: _Count | None = None
    """Least size of the buffer that the contexts of a program share; None sets no limit, as for all fields below."""
    most_pte_bytes: _Count | None = None
    most_dsp_heap_bytes: _Count | None = None
    """Greatest heap of the DSP in use after the last context; for runs with --heap."""
    most_dsp_heap_kept_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    """Greatest growth of the DSP's heap from before the first context to after the last; for runs with --heap."""
    intermediate_outputs: _Count | None = None
    """Exact number of layers whose outputs an inference writes."""
    least_decode_rate: _Rate | None = None
    """Least rate of generated tokens after the first, per second; this and the next field count on attached devices."""
    least_prefill_rate: _Rate | None = None
    """Least rate of tokens of a prompt, per second."""
    most_perplexity: _Rate | None = None
    """Greatest perplexity of the scored sequences on every device."""
    most_word_perplexity: _Rate | None = None
    """Greatest perplexity per word of a whole `score_text`, as lm-eval's `word_perplexity` of a document."""
    least_accuracy: dict[Literal["acc", "acc_norm"], Annotated[float, msgspec.Meta(ge=0, le=1)]] | None = None
    """Least share of right answers to the questions of the case's task, by metric."""
    precisions: tuple[str, ...] = ()
    """Precisions with this limit; empty for all."""
    socs: tuple[str, ...] = ()


class Metric(_Frozen, frozen=True):
    """Metric that a case requests for an output, computed from the FP32 reference and the output."""

    name: str
    """Name of a figure: `top1`, `tokens`, `psnr_db`."""
    output: Annotated[int, msgspec.Meta(ge=0)] | str = 0
    """Number or name of the output: `aux`, `[1].0`."""
    least: float | None = None
    """Least value; None sets no limit."""


class KnownIssue(_Frozen, frozen=True):
    """Failure with a known cause: it is shown with its evidence and does not turn a run red."""

    reason: str
    stage: Literal["build", "load", "execute", "numerics"] = "numerics"
    """Stage at which jobs fail; a failure at another stage is not covered."""
    precisions: tuple[str, ...] = ()
    """Precisions with this issue; empty for all."""
    socs: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    """Backends with this issue; empty for all. An entry of a manifest without the key has the backends of its suite."""
    virtual: bool = False
    """True for an issue of a simulator or stub on this machine, which covers no attached device."""
    intermittent: bool = False
    """True for an issue that varies between builds or executions: a pass does not end it."""
    evidence: str = ""
    """Figures that show the issue, and how they were obtained."""
    owner: str = ""
    """Person or team that owns the issue."""
    expires: date | None = None
    """Last day (UTC) of the issue; None for no end."""

    @property
    def summary(self) -> str:
        """Return the reason with owner and last day: `wrong rounding (ada, until 2027-01-31)`."""
        until = f"until {self.expires}" if self.expires else ""
        return f"{self.reason} ({', '.join(filter(None, (self.owner, until)))})" if self.owner or until else self.reason

    def has_expired(self, today: date) -> bool:
        """Return whether the issue has expired: its jobs fail again."""
        return self.expires is not None and self.expires < today


FORWARD = "forward"
"""Executed method of a case without `method`."""


class MethodInputs(_Frozen, frozen=True):
    """Inputs of a method of a module."""

    inputs: tuple[InputSpec, ...] = ()
    """Inputs; empty if the method of the case makes its own."""


class CaseFields(_Frozen, frozen=True, kw_only=True):
    """Fields of a case that its table in a manifest has with the same meaning."""

    checkpoint: str = ""
    """File with the weights of the module: a state dict as `.safetensors`, or saved by torch.save."""
    program: str = ""
    """`.pt2` file of torch.export, in place of a module."""
    pte: str = ""
    """Compiled `.pte` file; a module or program beside it computes the reference."""
    expected: tuple[tuple[str, ...], ...] = ()
    """With a `.pte` file: `.npy` files of the expected outputs, by sample, in place of a computed reference."""
    compiled_with: dict[str, str] = {}
    """With a `.pte` file: versions of `executorch` and `qnn` that compiled it, as far as known; for readers only."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    seed: _Seed = 0
    """Seed of torch when the module is made, for its weights."""
    samples: int = 1
    """Inferences per attempt, each with inputs of its own (the seed of sample n is seed + 1000 n)."""
    precisions: tuple[str, ...] = ()
    known_issues: tuple[KnownIssue, ...] = ()
    expect: tuple[Expectation, ...] = ()
    """Expectations; the first that matches a target counts. A target without a match has no expectation."""
    metrics: tuple[Metric, ...] = ()
    deterministic: bool | None = None
    """True if equal inputs always give equal outputs; None means True except for a module with state."""
    method: str = FORWARD
    """Executed method or submodule of the module; for a `.pte` file a method of the program."""
    methods: dict[str, MethodInputs] = {}
    """Methods of the program, if it has several."""
    features: Features = Features()
    state: tuple[State, ...] = ()
    """State from one sample to the next."""
    generate: Generate | None = None
    """Text generation, in place of a module or with a generating `.pte`."""


class Case(CaseFields, frozen=True):
    """Module with inputs, precisions and tolerances, independent of any SoC."""

    suite: str
    name: str
    module: str
    """`package.module:Class`, or `.module:Class` for a file in the folder of the suite, or `..sibling.module:Class` for
    one in a folder beside it; empty if `program`, or `pte` alone, takes its place."""
    inputs: tuple[InputSpec, ...]
    tolerances: dict[str, Tolerance] = {}
    """Tolerances by precision."""
    folder: str = ""
    """Folder of the suite: paths of files are relative to it."""

    @property
    def manifest(self) -> Path:
        """The file that declares the case."""
        return Path(self.folder, "suite.toml")

    def error(self, key: str, problem: str) -> ConfigError:
        """Return the error for an invalid `key` of the case; "" for the case as a whole."""
        return ConfigError(self.manifest, f"case.{self.name}{key and '.'}{key}", problem)

    @property
    def definition(self) -> tuple[Any, ...]:
        """Return the values that define program and inputs, without the content of files."""
        sources = (self.module, self.checkpoint, self.program, self.pte, self.expected)
        rare = {"method": self.method, "methods": self.methods, "features": self.features}
        usual = {"method": FORWARD, "methods": {}, "features": Features()}
        if self.state:
            rare["state"] = self.state
        if self.generate is not None:
            rare["generate"] = self.generate
        return (*sources, self.args, self.kwargs, self.inputs, self.seed, self.samples, *((rare,) * (rare != usual)))

    @property
    def files(self) -> tuple[str, ...]:
        """Return the files, and folders with weights, that the case names, relative to `folder`; no Python code."""
        named = (self.checkpoint, self.program, self.pte)
        specs = itertools.chain(self.inputs, *(method.inputs for method in self.methods.values()))
        inputs = (file for spec in specs for file in spec.files)
        libraries = itertools.chain.from_iterable(package.libraries for package in self.features.op_packages)
        generated = self.generate.files if self.generate is not None else ()
        every = (*named, *inputs, *itertools.chain(*self.expected), *libraries, *generated)
        return tuple(file for file in every if file)

    def tolerance(self, precision: str) -> Tolerance:
        """Return the limits at `precision`: the case's own, else the default."""
        defaults = _DEFAULTS if self.generate is None else _GENERATE_DEFAULTS
        return self.tolerances.get(precision) or defaults.get(precision, Tolerance())

    def precisions_on(self, backend: str) -> tuple[str, ...]:
        """Return the precisions of the case on `backend`: its declared ones, or on the CPU the backend's."""
        of_backend = BACKENDS[backend].precisions
        if self.pte:
            return tuple(precision for precision in self.precisions if precision in (*of_backend, READY))
        if runs_on_cpu(backend):
            return of_backend
        foreign = cpu_precisions().difference(of_backend)
        return tuple(precision for precision in self.precisions if precision not in foreign)

    def expectation(self, target: Target) -> Expectation | None:
        """Return the case's expectation for `target`; None on the CPU, and without a matching entry."""
        return None if runs_on_cpu(target.backend) else self.expectation_of_text(target)

    def expectation_of_text(self, target: Target) -> Expectation | None:
        """Return the entry whose rates, perplexity and accuracy count for `target`, also on the CPU."""
        for expected in self.expect:
            if _covers((expected.precisions, target.precision), (expected.socs, target.soc)):
                return expected
        return None

    def known_issue(self, target: Target, *, virtual: bool = True) -> KnownIssue | None:
        """Return the known issue that covers the case on `target`; with `virtual`, issues of virtual devices count."""
        for issue in self.known_issues:
            if issue.virtual and not virtual:
                continue
            places = ((issue.precisions, target.precision), (issue.socs, target.soc), (issue.backends, target.backend))
            if _covers(*places):
                return issue
        return None


def _covers(*places: tuple[tuple[str, ...], str]) -> bool:
    """Return whether each pair (names, name) matches: the name is among the names, or there are no names."""
    return all(not named or one in named for named, one in places)


class Suite(_Frozen, frozen=True):
    """A named list of cases."""

    name: str
    description: str
    backends: tuple[str, ...]
    cases: tuple[Case, ...]
    path: str
    """Path of the suite's manifest."""


class Target(_Frozen, frozen=True):
    """Target of a job: SoC, backend, precision and run-time options."""

    soc: str
    backend: str
    precision: str
    """Precision; empty for tests of `farm pytest`, whose precision is unknown."""
    options: OptionSet = ()

    @property
    def direct(self) -> bool:
        """True in direct mode, in which the runner works on the DSP."""
        return (DIRECT_MODE, "true") in self.options

    @property
    def mode(self) -> Literal["traditional", "direct"]:
        """Mode of the runtime that executes the target."""
        return "direct" if self.direct else "traditional"

    def __str__(self) -> str:
        options = "".join(f"-{key}={value}" for key, value in self.options)
        return f"{'-'.join(filter(None, (self.soc, self.backend, self.precision)))}{options}"


class Job(_Frozen, frozen=True):
    """Case on a target: the unit of compiling, scheduling and reports."""

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


def plan(
    suites: Sequence[Suite],
    socs: Sequence[Soc],
    backend: str,
    precisions: Sequence[str] = (),
    option_sets: Sequence[OptionSet] = ((),),
) -> tuple[Job, ...]:
    """Return the jobs of every case on every target, in the order of the manifests. Pure.

    Each set of `option_sets` makes separate targets. Jobs with the same set follow each other, because a process of the
    runner has one set.

    `precisions` selects among the precisions of the cases. Raises UsageError for a precision that is unknown or that
    `backend` does not run, and for a backend that a suite or SoC lacks. On a CPU backend every case runs, and the
    precisions of its manifest do not matter.
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
    for job in jobs:
        _check_features(job)
        # A ready program of the CPU is an exception: any `.pte` file runs there.
        if job.case.generate is not None and not (job.case.pte and runs_on_cpu(job.target.backend)):
            require_for_text(f"{job.case.suite}/{job.case.name}", job.target.backend, direct=job.target.direct)
        if job.target.direct:
            _check_direct(job.case)
    declared = {precision for suite in suites for case in suite.cases for precision in case.precisions_on(backend)}
    for precision in precisions:
        if precision not in declared:
            raise UnknownNameError("precision", precision, declared, "in the chosen suites")
    return tuple(jobs)


def _check_suites(suites: Sequence[Suite], backend: str) -> None:
    for suite in suites:
        legal = tuple(dict.fromkeys((*suite.backends, *cpu_backends())))
        if backend not in legal:
            raise IllegalTargetError(
                f"suite {suite.name} is not made for the {backend} backend: it is for {', '.join(legal)}"
            )
        if not any(case.precisions_on(backend) for case in suite.cases):
            raise IllegalTargetError(
                f"suite {suite.name} has no precision for the {backend} backend: its cases declare precisions that "
                f"only {', '.join(cpu_backends())} runs"
            )


def _check_direct(case: Case) -> None:
    name = f"{case.suite}/{case.name}"
    if any(spec.dynamic for spec in case.inputs):
        problem = "has dynamic sizes, and direct mode's runner requires fixed ones: leave direct_mode out"
        raise IllegalTargetError(f"{name} {problem}")
    if case.state:
        problem = "has a state, and direct mode's runner passes none between samples: leave direct_mode out"
        raise IllegalTargetError(f"{name} {problem}")
    for feature in case.features.named:
        if feature in NOT_DIRECT:
            raise IllegalTargetError(f"{name}: {feature} is not for direct mode (ExecuTorch 1.5): leave it out")


def _check_features(job: Job) -> None:
    if runs_on_cpu(job.target.backend):
        return
    backend = BACKENDS[job.target.backend]
    for name in job.case.features.named:
        if name not in backend.features:
            able = ", ".join(other.name for other in BACKENDS.values() if name in other.features)
            raise IllegalTargetError(
                f"{job.case.suite}/{job.case.name}: {name} is for {able}, not for the {backend.name} backend"
            )
