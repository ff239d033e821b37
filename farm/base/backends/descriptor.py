"""Descriptor of a backend as plain data: all differences between backends. Torch-free."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from farm.base.errors import UnknownNameError, UsageError

# ExecuTorch 1.5, backends/qualcomm/quantizer: QuantDtype.
QUANTIZED_PRECISIONS = ("8a8w", "8a4w", "16a16w", "16a8w", "16a4w", "16a4w_block", "16a2w", "fp16a8w")

_INT_MAX = 2**31 - 1


class BackendOption(msgspec.Struct, frozen=True):
    """Option of a backend."""

    when: Literal["compile", "run"]
    """`compile`: a parameter of `Backend.compiler_spec`, and part of the bundle; `run`: a flag of the runner, which
    holds for a whole process of it."""
    words: dict[str, int] = {}
    """Values of the option with ExecuTorch's numbers; empty for a plain number or a file."""
    least: int = 0
    greatest: int = _INT_MAX
    help: str = ""
    set_by: str = ""
    """Setter of the option; "" for the user's --option."""
    suffix: str = ""
    """Suffix of the backend's file in the folder of a job; "" for a number or a word."""
    needs: tuple[str, str] | None = None
    """The option, and its value, without which it has no effect."""

    def normalize(self, name: str, text: str) -> str:
        """Return the one spelling of a value. Raises UsageError, UnknownNameError."""
        if self.suffix:
            # A file of its own: the backend overwrites it, and must not find the program there, or leave the folder.
            if not re.fullmatch(rf"\w{{1,60}}{re.escape(self.suffix)}", text, re.ASCII):
                raise UsageError(
                    f"option {name}={text[:40]}: expected the name of a file, as weights{self.suffix}, "
                    f"of letters, digits and _ before {self.suffix}"
                )
            return text
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


SWITCH = {"false": 0, "true": 1}

DIRECT_MODE = "direct_mode"
"""The option of a backend that has a direct mode: QNN and ExecuTorch's delegate run on the DSP itself."""
DIRECT_OPTION = {DIRECT_MODE: BackendOption("compile", SWITCH, help="QNN and the delegate run on the DSP itself")}


class HostLibrary(msgspec.Struct, frozen=True):
    """A library of a QNN SDK for this machine that compiling needs, as pip brings none that works."""

    name: str
    why: str
    """Reason against pip's release, with the next step; `{get_sdk}` and `{target}` are filled in."""
    before: tuple[int, int] | None = None
    """The first QNN release whose library does not work."""
    too_new: str = ""
    """Problem of such a release."""


QNN_FEATURES = ("dump_intermediate_outputs", "saver", "skip_node_ops", "skip_node_ids")
"""Features of ExecuTorch's compiler for all backends of QNN."""


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptor of a backend. In file names, braces hold fields of a Soc: `libQnnHtpV{htp_arch}Skel.so`."""

    name: str
    precisions: tuple[str, ...]
    flow: str
    """Module whose FLOW lowers a program: farm/builds/compile/flows/flow.py. Imported in builder processes only."""
    delegate: str = "QnnBackend"
    """ExecuTorch's id of its delegates in a `.pte`."""
    options: dict[str, BackendOption] = {}
    frame_defaults: dict[str, str] = {}
    """Compiler's values of `fps`, `ftrt_ratio`, `core_selection` and `client_perf_type`, for a backend that refuses a
    program whose frame rate it cannot keep. Options of the runner have the backend's name before them: `lpai_fps`."""
    features: tuple[str, ...] = ()
    """Compiler features of cases: names of `farm.suites.suite.Features`; on the CPU they are left out."""

    on_cpu: bool = False
    """True for a backend of every SoC that runs every case without QNN; manifests do not name it."""
    qnn_type: int | None = None
    """ExecuTorch's QnnExecuTorchBackendType; None without QNN."""
    first_qnn: tuple[int, int] | None = None
    """The first QNN release that has it."""
    host_library: HostLibrary | None = None
    cpu_quantizes: bool = False
    """The CPU quantizes what enters a delegate and dequantizes what leaves it: no `expect` names these operators."""
    online_prepare: bool = False
    """The device, not the compiler, makes the graph."""
    compiler_spec: str = ""
    """Name of ExecuTorch's function that takes the options of the compiler; "" without QNN."""
    by_precision: dict[str, dict[str, int]] = {}
    """Parameters of that function that follow from the precision: ExecuTorch's number by precision."""
    host_cpus: dict[str, int] = {}
    """Parameter `target_env` of that function by the processor that calls QNN; empty where the bundle is for any."""

    on_host: Literal["runs", "rehearsed", "absent"] = "absent"
    """Support on this machine: `runs` programs; `rehearsed` tries staging, options and rights alone; or `absent`."""
    hardware: str = ""
    """Field of a Soc with its hardware version; "" if all files are equal."""
    libraries: tuple[str, ...] = ()
    """QNN's files for the device's processor."""
    skel: str = ""
    """QNN's file for the DSP."""
    dsp_folder: str = ""
    """Folder of the files for the DSP, below lib/ of an SDK; the files are in its `signed` or `unsigned`."""
    signed: bool = False
    """The DSP loads signed files only."""
    direct_library: str = ""
    """QNN's library on the DSP in direct mode; "" for a backend without direct mode."""
    direct_domain: int = 0
    """Process domain of direct mode: ExecuTorch 1.5, examples/qualcomm/direct_executor_runner."""
    needs_root: bool = False

    generates_text: bool = False
    """Decoders are compiled for it. ExecuTorch 1.5 has static ones for GPU as well, of which farm has no reference."""
    health_check_precision: str = "8a8w"
    """Precision that every SoC with the backend supports."""
    keeps_health_check: bool = False
    """A session keeps the health check loaded, as the backend goes down with the last program."""
    has_dsp_heap: bool = False
    """ExecuTorch profiles the DSP's heap."""
    has_layers: bool = False
    """`farm debug` can compare its layers: QNN writes their outputs when its programs are compiled for that."""

    @property
    def simulated(self) -> bool:
        """True if a simulator of this machine runs its programs."""
        return self.on_host == "runs" and not self.on_cpu
