"""Options that a QNN delegate in a `.pte` was compiled with.

Layout: backends/qualcomm/serialization/qc_compiler_spec.fbs of executorch 1.5.1.
"""

from __future__ import annotations

import msgspec

from farm.base.backends.registry import BACKENDS
from farm.base.socs import load_socs
from farm.builds.program.flatbuffer import Flatbuffer, Positions, Slot

_DSP = 3  # QnnExecuTorchBackendType.kDspBackend, which farm has no backend for
_QNN_SOC, _QNN_BACKEND, _QNN_ONLINE, _QNN_DUMP = Slot(0, "table"), Slot(1, "table"), Slot(4, "?"), Slot(5, "?")
_QNN_PROFILE, _QNN_SHARED_BUFFER = Slot(6, "<i4"), Slot(7, "?")
_QNN_PACKAGES, _PACKAGE_INFOS, _PACKAGE_PATH = Slot(11, "table"), Slot(0, "[table]"), Slot(1, "text")
_SOC_MODEL, _BACKEND_TYPE = Slot(0, "<i4"), Slot(0, "<i4")
# Options of a backend, and whether its contexts share weights: of HTP and of GPU.
_SHARES_WEIGHTS = ((Slot(1, "table"), Slot(8, "?")), (Slot(2, "table"), Slot(5, "?")))


class QnnOptions(msgspec.Struct, frozen=True):
    """Options of a QNN delegate."""

    soc_model: int
    """`QcomChipset`: `soc_id` of a device profile."""
    backend: str
    """`htp`, `gpu`, `lpai` or `dsp`; `type N` for a backend that ExecuTorch 1.5 lacks."""
    online_prepare: bool
    """True for a graph that the device prepares when it loads the program."""
    profile_level: int
    """0 off, 1 basic, 2 detailed, 3 optrace."""
    dump_intermediate_outputs: bool = False
    shared_buffer: bool = False
    op_packages: tuple[str, ...] = ()
    """Paths of libraries with operators, of all machines, which QNN opens when it starts."""
    use_weight_sharing: bool = False
    """True for a program that holds the common weights of its methods once."""

    @property
    def soc(self) -> str:
        """Name of the SoC; `SoC model N` for a number without a device profile."""
        names = [soc.name for soc in load_socs().values() if soc.soc_id == self.soc_model]
        return names[0] if names else f"SoC model {self.soc_model}"


def read_qnn_options(data: bytes) -> QnnOptions:
    """Return the options in the compile spec of a QNN delegate. Raises FlatbufferError for a malformed spec."""
    file = Flatbuffer(data)
    root = file.root(0)
    soc = file.tables(root, _QNN_SOC).positions
    backend = file.tables(root, _QNN_BACKEND).positions
    kind = _first(file, backend, _BACKEND_TYPE)
    _, packages = file.vectors(file.tables(root, _QNN_PACKAGES).positions, _PACKAGE_INFOS)
    names = {_DSP: "dsp", **{one.qnn_type: name for name, one in BACKENDS.items() if one.qnn_type is not None}}
    return QnnOptions(
        soc_model=_first(file, soc, _SOC_MODEL),
        backend=names.get(kind, f"type {kind}"),
        online_prepare=bool(_first(file, root, _QNN_ONLINE)),
        profile_level=_first(file, root, _QNN_PROFILE),
        dump_intermediate_outputs=bool(_first(file, root, _QNN_DUMP)),
        shared_buffer=bool(_first(file, root, _QNN_SHARED_BUFFER)),
        op_packages=tuple(file.texts(packages, _PACKAGE_PATH)),
        use_weight_sharing=any(
            _first(file, file.tables(backend, options).positions, shares) for options, shares in _SHARES_WEIGHTS
        ),
    )


def _first(file: Flatbuffer, tables: Positions, slot: Slot) -> int:
    return int(file.numbers(tables, slot)[0]) if len(tables) else slot.default
