"""A checkout of ExecuTorch with 24 commits, four of which break something that `farm bisect --commits` has to name."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from executorch_checkout import commit, make_checkout

if TYPE_CHECKING:
    from pathlib import Path

_QUALCOMM = "backends/qualcomm"
_PASSES = f"{_QUALCOMM}/_passes"

NUMERICS, SLOWER, IMPORT, COMPILE = "numerics", "slower", "import", "compile"
JOBS = {
    NUMERICS: "quantized_ops/silu[SM8650-htp-8a8w]",
    SLOWER: "quantized_ops/expm1[SM8650-htp-8a8w]",
    IMPORT: "quantized_ops/abs[SM8650-htp-8a8w]",
    COMPILE: "quantized_ops/relu[SM8650-htp-8a8w]",
}
"""Which job meets which defect."""


class Edit(NamedTuple):
    """One commit."""

    subject: str
    path: str
    old: str = ""
    """Empty: a line is added at the end of the file, which may be new."""
    new: str = ""
    defect: str = ""


_EXPM1 = """                    exp_node.meta = copy_meta(node.meta)
"""
_EXPM1_SLOWLY = """                    exp_node.meta = copy_meta(node.meta)
                    for _ in range(30):
                        with graph_module.graph.inserting_after(exp_node):
                            twice = graph.create_node("call_function", torch.ops.aten.add.Tensor, (exp_node, exp_node))
                            twice.meta = copy_meta(node.meta)
                        with graph_module.graph.inserting_after(twice):
                            exp_node = graph.create_node("call_function", torch.ops.aten.mul.Tensor, (twice, 0.5))
                            exp_node.meta = copy_meta(node.meta)
"""

EDITS = (
    Edit("Docs: how to build", "docs/build.md", new="Build it.\n"),
    Edit("Sine: say what it is", f"{_QUALCOMM}/builders/op_sin.py", new="# Of radians.\n"),
    Edit("A test of the sine", f"{_QUALCOMM}/tests/test_sine.py", new="def test_sine(): ...\n"),
    Edit(
        "Copy in another way", f"{_PASSES}/utils.py",
        "    copied = {}\n    for k, v in", "    copied = dict()\n    for k, v in",
    ),
    Edit("Docs: devices", "docs/devices.md", new="Phones.\n"),
    Edit("Cosine: say what it is", f"{_QUALCOMM}/builders/op_cos.py", new="# Of radians.\n"),
    Edit("Emitter: a remark", "exir/emit/_emitter.py", new="# The end of the emitter.\n"),
    Edit("README", "README.md", new="ExecuTorch.\n"),
    Edit(
        "Passes: use the new helper", f"{_PASSES}/qnn_pass_manager.py", new="from .utils import no_such_helper\n",
        defect=IMPORT,
    ),
    Edit("Passes: without the helper", f"{_PASSES}/qnn_pass_manager.py", "from .utils import no_such_helper\n", ""),
    Edit("Docs: once more", "docs/build.md", new="With CMake.\n"),
    Edit("Softmax: a remark", f"{_QUALCOMM}/builders/op_softmax.py", new="# Along one axis.\n"),
    Edit("Partitioner: a revision", f"{_QUALCOMM}/partition/qnn_partitioner.py", new="_REVISION = 2\n"),
    Edit(
        "SiLU: simpler", f"{_PASSES}/decompose_silu.py",
        "(silu_node_input, sigmoid_node),", "(sigmoid_node, sigmoid_node),", NUMERICS,
    ),
    Edit("Docs: what is new", "docs/news.md", new="SiLU is simpler.\n"),
    Edit("Visitor: a revision", f"{_QUALCOMM}/builders/node_visitor.py", new="_REVISION = 2\n"),
    Edit("expm1: keep it positive", f"{_PASSES}/decompose_expm1.py", _EXPM1, _EXPM1_SLOWLY, SLOWER),
    Edit("README: a badge", "README.md", new="It works.\n"),
    Edit("Arc tangent: a remark", f"{_QUALCOMM}/builders/op_atan.py", new="# In radians.\n"),
    Edit(
        "ReLU: check the input", f"{_QUALCOMM}/builders/op_relu.py",
        "        input_node = self.get_node(node.args[0])\n",
        "        input_node = self.get_node(node.args[0])\n        assert len(node.args) > 1, 'ReLU has no input'\n",
        COMPILE,
    ),
    Edit("A test of the cosine", f"{_QUALCOMM}/tests/test_cosine.py", new="def test_cosine(): ...\n"),
    Edit("XNNPACK: a remark", "backends/xnnpack/__init__.py", new="# For the CPU.\n"),
    Edit("Docs: the last word", "docs/news.md", new="That is all.\n"),
    Edit("Programs: a remark", "exir/program/_program.py", new="# The end of the program.\n"),
)  # fmt: skip


def make_history(folder: Path) -> tuple[str, dict[str, str]]:
    """Make the checkout with its commits; return its first commit, and the one of each defect."""
    first, found = make_checkout(folder), {}
    for edit in EDITS:
        path = folder / edit.path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if edit.old:
            assert text.count(edit.old) == 1, f"{edit.path} has {edit.old!r} {text.count(edit.old)} times"
            text = text.replace(edit.old, edit.new)
        else:
            text += edit.new
        sha = commit(folder, edit.subject, {edit.path: text})
        if edit.defect:
            found[edit.defect] = sha
    return first, found
