"""Bundle: the result of compiling a job, a folder addressed by the hash of all its ingredients."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import BundleError
from farm.base.hashes import sha256_of
from farm.base.socs import find_soc
from farm.suites.figures import REFERENCES
from farm.suites.prompts import Likelihoods
from farm.suites.suite import State, why_on_device

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Bundle: the result of compiling a job, a folder addressed by the hash of all its ingredients.
#
# manifest.json model.pte inputs/input_{sample}_{index}.raw native dtype, in the memory order of the program
# reference_fp32/output_{sample}_{index}.raw outputs of the FP32 module, in the same way
# reference_quantized/output_{sample}_{index}.raw outputs of the quantized module, on the CPU; none in floating point
# origins.json module path and source line of nodes; missing if all are unknown op_packages/{place}/{hash}.so the
# case's own operators for the machines of PACKAGES_OF, if it has some saver/ QNN's calls as C code, and their data;
# only if the case requests them optrace/ graphs and their schematics, for the SDK's tools; only if compiled for them
# build.log


MANIFEST = "manifest.json"
MODEL = "model.pte"
INPUTS = "inputs"
LIKELIHOOD_COLUMNS = 2
"""Number of columns of an output with likelihoods in place of logits; one row for each position of a sequence."""
OPTRACE = "optrace"
SAVER = "saver"
OP_PACKAGES = "op_packages"
PACKAGES_OF = {"simulator": ("x86_64",), "android": ("hexagon", "android")}
"""Kind of runtime -> folders of op packages whose libraries it opens; other kinds open none (ExecuTorch 1.5)."""


class Constant(StrEnum):
    """Origin of an output that does not depend on the inputs."""

    NONE = ""
    """The inputs decide the output."""
    LITERAL = "literal"
    """Constants of the program without arithmetic, at most moved: equal on every backend."""
    COMPUTED = "computed"
    """Computed from constants, by the arithmetic of the backend."""


class TensorSpec(msgspec.Struct, frozen=True):
    """Shape and dtype (numpy's name) of one input or output; `mutable` buffers are not listed."""

    shape: tuple[int, ...]
    dtype: str
    step: float | None = None
    """Quantization step of an output, in the output's unit; None if it is not quantized, or not with a single step."""
    order: tuple[int, ...] = ()
    """Dimensions from the outermost to the innermost in raw files, as in the program's memory; () for C order."""
    constant: Constant = Constant.NONE
    """Origin of an output by the exported graph."""
    name: str = ""
    """Path of an output in the return value, `aux` or `[1].0`; of a written input its name. Empty for an output with
    a number alone."""
    written: bool = False
    """True for the value that the program writes to its input `name`, which is no output."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        import numpy as np

        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


class Generation(msgspec.Struct, frozen=True):
    """Facts of a bundle that generates text, besides its tensors: see `farm.suites.generate`.

    A sample has two inputs, token ids as int32 with -1 after their end: the prompt, and the sequence whose logits are
    judged. The outputs are float32 [positions of the judged sequence, vocabulary], in the unit of the logits: row n has
    the logits of the token after token n. The first output is computed like generated text (the prompt by
    `prefill_forward` if the program has it, the rest by `kv_forward`); programs with `prefill_forward` have a second
    output, computed by `kv_forward` alone.
    """

    mode: str
    """`kv`, `hybrid` or `lookahead`."""
    context: int
    prefill: int
    """Positions of a call of `prefill_forward`; 0 without one."""
    decode: int
    """Positions of a call of `kv_forward`."""
    layers: int
    vocabulary: int
    cache_bits: int
    """Bits of an element of the caches: 8, 16, or 32 for caches that are not quantized."""
    new: int
    """Number of tokens to generate after each prompt."""
    stop: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    """Length of the prompt, by sample."""
    scored: tuple[int, ...] = ()
    """Number of judged positions of the outputs, by sample."""
    tokens: dict[str, tuple[tuple[int, ...], ...]] = {}
    """Tokens that each reference generates with greedy search, by sample."""
    likelihoods: Likelihoods | None = None
    """Request for likelihoods in place of logits; None for logits. The only output is then float32 [positions,
    LIKELIHOOD_COLUMNS]:
    the logarithm of the probability of the sequence's next token, and of the likeliest token; 0 after the end."""


class ProgramFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a bundle's program."""

    outputs: tuple[TensorSpec, ...]
    """Outputs in the order of the program: written inputs come before all others."""
    delegates: dict[str, int]
    """Delegated partitions by delegate id: `QnnBackend`, `XnnpackBackend`."""
    delegated_ops: int | None
    """Nodes of the edge graph in delegates; None for a program that was compiled elsewhere."""
    fallback_ops: dict[str, int]
    """Operators that no delegate took, and how often: ExecuTorch's own kernels run them on the CPU."""
    operators: dict[str, int] = {}
    """Number of operators built by the QNN backend, by the target of their node visitor (`aten.add.Tensor`)."""
    dynamic: bool = False
    """True if shapes may be below the program's bounds, so that the runner needs the shapes of each execution."""
    stateful: bool = False
    """True if the module changes its buffers, so that an inference may depend on earlier inferences."""
    method: str = "forward"
    """Executed method of the program."""
    method_index: int = 0
    """Index of `method` among the methods of the program."""
    features: tuple[str, ...] = ()
    """Features of the compilation: names of `farm.suites.suite.Features`."""
    spill_fill_bytes: int | None = None
    """Size of the buffer that the program's contexts share; None without a shared buffer."""
    generation: Generation | None = None
    """Facts of a case that generates text; None for other cases."""
    state: tuple[State, ...] = ()
    """Values passed from a sample to the next; inputs of later samples have the values of the FP32 module."""
    writes: tuple[str, ...] = ()
    """Writes of the module that the program has: `input x`, `buffer total`."""
    lost_writes: tuple[str, ...] = ()
    """Writes of the module that the program lacks."""


class Manifest(ProgramFacts, frozen=True, kw_only=True):
    """Contents of a bundle and facts of its compilation."""

    key: str
    """Hash of all ingredients: the name of the folder in the cache."""
    job_id: str
    soc: str
    backend: str
    precision: str
    samples: int
    inputs: tuple[TensorSpec, ...]
    pte_bytes: int
    seconds: dict[str, float]
    """Wall time by step: reference, export, quantize, quantized_reference, lower, serialize, total."""
    versions: dict[str, str]
    """Versions of executorch, torch, torchao and qnn, as far as the bundle depends on them."""
    files: dict[str, str]
    """SHA-256 of every other file of the bundle, by relative path (build.log is not among them)."""
    references: tuple[str, ...] = REFERENCES
    """References of the bundle, a part of REFERENCES."""
    peak_bytes: int = 0
    """Peak resident memory of the compiler process during the job, with memory kept from earlier jobs; 0 if
    unknown."""
    program: str = ""
    """Hash of the program by `farm.builds.program.canonical`; empty in older bundles."""

    def output_number(self, place: int) -> int:
        """Return the number of the program's output at `place`: outputs count from 0, written inputs after them."""
        outputs = [index for index, spec in enumerate(self.outputs) if not spec.written]
        return outputs.index(place) if place in outputs else len(outputs) + place

    def output_place(self, output: int | str) -> int | None:
        """Return the place of an output in the program, by its number or name; None for an unknown output."""
        places = [index for index, spec in enumerate(self.outputs) if not spec.written]
        if isinstance(output, int):
            return places[output] if output < len(places) else None
        return next((place for place in places if self.outputs[place].name == output), None)

    def output_label(self, place: int) -> str:
        """Return the label of the program's output at `place`: `output 0`, `output aux`, `input x as written`."""
        name = self.output_name(place) or str(self.output_number(place))
        return name if self.outputs[place].written else f"output {name}"

    def output_name(self, place: int) -> str:
        """Return the name of the output at `place`, `aux` or `input x as written`; empty for a number alone."""
        spec = self.outputs[place]
        return f"input {spec.name} as written" if spec.written else spec.name

    @property
    def partitions(self) -> int:
        """Delegated partitions in all."""
        return sum(self.delegates.values())

    @property
    def needs_device(self) -> str:
        """Reason why no simulator executes the bundle, as far as known; "" if a simulator does."""
        return why_on_device(self.features)

    def lacks_for(self, kind: str) -> str:
        """Return the op packages that a runtime of `kind` lacks, with the next step; "" if none is missing."""
        if OP_PACKAGES not in self.features:
            return ""
        if kind not in PACKAGES_OF:
            return "QNN opens op packages on Android and on x86_64 alone (ExecuTorch 1.5)"
        if self.packages_for(kind):
            return ""
        arch = find_soc(self.soc).htp_arch
        return f"not every op package has libraries for a {self.soc}: name android and hexagon.v{arch} in suite.toml"

    def packages_for(self, kind: str) -> list[str]:
        """Return the names of the bundle's op packages that a runtime of `kind` opens."""
        places = tuple(f"{OP_PACKAGES}/{place}/" for place in PACKAGES_OF.get(kind, ()))
        return [name for name in self.files if name.startswith(places)] if places else []


class Bundle(msgspec.Struct, frozen=True):
    """Published bundle on this machine."""

    folder: Path
    manifest: Manifest

    @property
    def model(self) -> Path:
        """Path of the `.pte` file."""
        return self.folder / MODEL

    def input_files(self, sample: int) -> list[Path]:
        """Return the input files of one sample, in the order of the inputs."""
        return [self.folder / INPUTS / f"input_{sample}_{i}.raw" for i in range(len(self.manifest.inputs))]

    def reference(self, kind: str, sample: int, index: int) -> NDArray[np.generic]:
        """Return an output of the manifest's reference `kind`, with the manifest's shape and dtype."""
        path = self.folder / f"reference_{kind}" / f"output_{sample}_{index}.raw"
        return read_tensor(path, self.manifest.outputs[index])

    def verify(self) -> None:
        """Raise BundleError unless every file has its hash of the manifest."""
        for name, expected in self.manifest.files.items():
            path = self.folder / name
            try:
                actual = sha256_of(path)
                problem = f"hash is {actual[:12]}, expected {expected[:12]}" if actual != expected else ""
            except OSError as error:
                problem = error.strerror or str(error)
            if problem:
                what_to_do = "the cache is damaged; run 'farm setup cache prune --all --yes' and build again"
                raise BundleError(f"{path}: {problem}: {what_to_do}")


def load_bundle(folder: Path) -> Bundle:
    """Read the bundle in `folder`. Raises BundleError for a folder without a bundle."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise BundleError(f"{folder}: not a bundle: {error}") from None
    return Bundle(folder, manifest)


def read_tensor(path: Path, spec: TensorSpec) -> NDArray[np.generic]:
    """Return the tensor in a raw file, in C order. Raises ValueError for a size other than `spec.nbytes`."""
    import numpy as np

    from farm.builds.program.pte import from_memory

    size = path.stat().st_size
    if size != spec.nbytes:
        raise ValueError(f"{path.name} has {size} bytes, expected {spec.nbytes} for {spec}")
    return from_memory(np.fromfile(path, dtype=np.dtype(spec.dtype)), spec.shape, spec.order)


# Origins of a program's nodes: module of the model and line of its code.


ORIGINS = "origins.json"
"""Name of the file with the origins in a bundle; missing if all are unknown."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Origin of a node."""

    module: str
    """Path of the module in the model, `layers.3.conv`; empty for the model itself and if unknown."""
    source: str
    """Line of code, `models/text.py:42`, relative to the folder that contains the suite or to Python's search path;
    empty if unknown."""


class Origins(msgspec.Struct, frozen=True):
    """Known origins of a program's nodes."""

    calls: dict[int, dict[str, Origin]] = {}
    """Origins of delegated nodes, by the instruction of the delegate's call and the node's name `aten_relu_default`."""
    kernels: dict[int, Origin] = {}
    """Origins of operators on the CPU, by their instruction."""

    def __bool__(self) -> bool:
        return bool(self.kernels) or any(self.calls.values())


UNKNOWN = Origin("", "")
NO_ORIGINS = Origins()


def place_of(origin: Origin) -> str:
    """Return ` (module layers.3, models/text.py:42)`; "" for an unknown origin."""
    known = (f"module {origin.module}" if origin.module else "", origin.source)
    return f" ({', '.join(filter(None, known))})" if any(known) else ""


def read_origins(folder: Path) -> Origins:
    """Return the known origins of the bundle in `folder`. Raises BundleError for an unreadable file."""
    path = folder / ORIGINS
    try:
        return msgspec.json.decode(path.read_bytes(), type=Origins)
    except FileNotFoundError:
        return NO_ORIGINS
    except (OSError, msgspec.DecodeError) as error:
        raise BundleError(f"{path}: {error}: run 'farm setup cache prune --all --yes' and build again") from None


def write_origins(folder: Path, origins: Origins) -> None:
    """Write `origins` into the bundle in `folder`; no file if all are unknown."""
    if origins:
        (folder / ORIGINS).write_bytes(msgspec.json.encode(origins))
