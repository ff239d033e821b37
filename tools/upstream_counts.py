"""Plugin of pytest: records the counts that ExecuTorch's own Qualcomm tests expect beside the counts of this run.

`-p upstream_counts` with the file in $UPSTREAM_COUNTS_FILE. Tests run unchanged; the functions that they call
are watched. One line a count: test, counted item, upstream's count, ours (null if the test ended before), and whether
upstream's test checks it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

FILE_VARIABLE = "UPSTREAM_COUNTS_FILE"

PARTITIONS, CONTEXTS, COMPARED = "partitions", "contexts", "compared layers"
HANDLES, HEAP_LINES = "debug handles", "heap numbers"
UNCHECKED = (CONTEXTS,)
"""Counts that upstream's tests ask for and do not check: a graph of few nodes is not divided into equal shares."""


class Counts:
    """Counts of the test that runs, written when it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._golden: dict[str, int] = {}
        self._ours: dict[str, int] = {}

    def begin(self) -> None:
        """Clear the counts of the previous test."""
        self._golden, self._ours = {}, {}

    def expect(self, what: str, count: int) -> None:
        """Add to the count that upstream's test expects."""
        self._golden[what] = self._golden.get(what, 0) + count

    def found(self, what: str, count: int) -> None:
        """Add to the count of this run."""
        self._ours[what] = self._ours.get(what, 0) + count

    def expects(self, what: str) -> bool:
        """Return whether upstream's test expects a count named `what`."""
        return what in self._golden

    def end(self, item: pytest.Item) -> None:
        """Write the counts of a test."""
        place = inspect.getsourcelines(inspect.unwrap(item.obj))[1] if hasattr(item, "obj") else 0
        lines = [
            json.dumps({
                "test": item.nodeid.partition("::")[2], "line": place, "what": what, "upstream": count,
                "ours": self._ours.get(what), "checked": what not in UNCHECKED,
            })
            for what, count in self._golden.items()
        ]  # fmt: skip
        # A single write, as workers share the file.
        with self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))


class Watch:
    """Hooks of one pytest process."""

    def __init__(self, path: Path) -> None:
        self._counts = Counts(path)

    def pytest_collection_finish(self) -> None:
        """Watch the functions that tests call, once their modules are imported."""
        from executorch.backends.qualcomm.export_utils import SimpleADB
        from executorch.backends.qualcomm.tests import utils
        from executorch.devtools import Inspector
        from executorch.exir import ExecutorchProgramManager

        watched: tuple[tuple[Any, str, Callable[..., None], Callable[..., None]], ...] = (
            (utils.TestQNN, "lower_module_and_test_output", self._lowering, _nothing),
            (utils.TestQNN, "verify_output", self._verifying, _nothing),
            (utils.TestQNN, "split_graph", self._splitting, _nothing),
            (utils, "to_edge_transform_and_lower_to_qnn", _nothing, self._lowered),
            (Inspector, "calculate_numeric_gap", _nothing, self._compared),
            (ExecutorchProgramManager, "get_etrecord", _nothing, self._recorded),
        )
        for owner, name, before, after in watched:
            if hasattr(owner, name):
                setattr(owner, name, _watched(getattr(owner, name), before, after))
        SimpleADB.pull_heap_output = self._pulling_heap(SimpleADB.pull_heap_output)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin the counts of a test."""
        self._counts.begin()
        # This expectation is no argument: upstream's test expects a handle for each node that it names.
        if handles := _entries(item, "name_handle_map"):
            self._counts.expect(HANDLES, handles)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """End the counts of a test."""
        self._counts.end(item)

    def _lowering(self, *, expected_partitions: int = 1, expected_compared_events: int = -1, **_: Any) -> None:
        self._counts.expect(PARTITIONS, expected_partitions)
        if expected_compared_events != -1:
            self._counts.expect(COMPARED, expected_compared_events)

    def _lowered(self, *, result: Any) -> None:
        nodes = result.exported_program().graph.nodes
        self._counts.found(PARTITIONS, sum("executorch_call_delegate" in str(node.target) for node in nodes))

    def _splitting(self, *, division: int, **_: Any) -> None:
        self._counts.expect(CONTEXTS, division)

    def _verifying(self, *, executorch_prog: Any, save_heap_result: bool = False, **_: Any) -> None:
        delegates = executorch_prog.executorch_program.execution_plan[0].delegates
        self._counts.found(CONTEXTS, len(delegates))
        if save_heap_result:
            # tests/utils.py, validate_heap_profile: one before the first context, one after the last.
            self._counts.expect(HEAP_LINES, 2)

    def _compared(self, *, result: Any) -> None:
        self._counts.found(COMPARED, len(result))

    def _recorded(self, *, result: Any) -> None:
        if self._counts.expects(HANDLES):
            self._counts.found(HANDLES, len(result._debug_handle_map["forward"][0]))  # noqa: SLF001 - as upstream's test

    def _pulling_heap(self, pull: Any) -> Any:
        """Return `pull`, with the numbers of the file counted before upstream's check, which may end the test."""

        @functools.wraps(pull)
        def call(adb: Any, source: str, place: str, callback: Any = None) -> None:
            def counted() -> None:
                if Path(place).is_file():
                    lines = Path(place).read_text().splitlines()
                    self._counts.found(HEAP_LINES, sum(bool(line.strip()) for line in lines))
                if callback:
                    callback()

            pull(adb, source, place, callback=counted)

        return call


def _entries(item: pytest.Item, name: str) -> int:
    """Return the number of entries of the dictionary that a test assigns to `name`; 0 without one."""
    function = inspect.unwrap(getattr(item, "obj", _nothing))
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)):
            continue
        if [name] == [target.id for target in node.targets if isinstance(target, ast.Name)]:
            return len(node.value.keys)
    return 0


def _watched(function: Any, before: Callable[..., None], after: Callable[..., None]) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A watch that fails leaves its count out, and the test alone.
        with contextlib.suppress(Exception):
            before(**_given(signature, args, kwargs))
        result = function(*args, **kwargs)
        with contextlib.suppress(Exception):
            after(result=result)
        return result

    return call


def _given(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = dict(signature.bind(*args, **kwargs).arguments)
    given.pop("self", None)
    return given


def _nothing(**_: Any) -> None:
    return


def pytest_configure(config: pytest.Config) -> None:
    """Watch where a file is named."""
    if path := os.environ.get(FILE_VARIABLE):
        config.pluginmanager.register(Watch(Path(path)), "upstream-counts-watch")
