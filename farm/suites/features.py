"""Features of a QNN backend that a case requires beyond operators: compiler settings and device requirements."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

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
