"""Comparators of the user's, which `farm debug --metric` names: found, judged as files, and asked. Imports executorch.

A user's code runs here alone, in the compiler process. What ExecuTorch's comparators do before they compare,
dequantizing and turning the layout back, is done already when one is asked.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.qualcomm.debugger.qcom_numerical_comparator_base import QcomNumericalComparatorBase
from executorch.devtools.inspector.numerical_comparator import NumericalComparatorBase

from farm.base.errors import UsageError
from farm.base.trust import weakness
from farm.builds.compile.debug.protocol import no_module
from farm.builds.compile.flows.factory import import_name
from farm.builds.compile.protocol import reason_of
from farm.builds.program.layers import Score

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch.export import ExportedProgram

    from farm.builds.compile.debug.protocol import UserMetric
    from farm.suites.suite import Case

_NAME_LIMIT = 40


class MetricClass:
    """The class that a `--metric` names."""

    def __init__(self, metric: UserMetric, case: Case) -> None:
        """Import it. Raises UsageError for what cannot be, and for a file that somebody else could have written."""
        self._metric = metric
        module = _import(metric, case)
        found = getattr(module, metric.name, None)
        if found is None:
            raise UsageError(f"--metric {metric}: {metric.module} has no class {metric.name}")
        if not inspect.isclass(found) or not issubclass(found, NumericalComparatorBase):
            raise UsageError(
                f"--metric {metric}: {metric.name} is no comparator: derive a class from "
                "QcomNumericalComparatorBase of executorch.backends.qualcomm.debugger.qcom_numerical_comparator_base"
            )
        self._class: Any = found
        self._origin = Path(module.__file__) if module.__file__ else None

    @property
    def note(self) -> str:
        """What a result says of the code that judged it."""
        if self._origin is None:
            return f"metric {self._metric}"
        digest = hashlib.sha256(self._origin.read_bytes()).hexdigest()
        return f"metric {self._metric}: {self._origin.name} with SHA-256 {digest[:16]}"

    def bind(self, edge: ExportedProgram) -> BoundMetric:
        """Return the comparator for a program. Raises UsageError for a class that cannot be made so."""
        limits = {} if self._metric.threshold is None else {"threshold": self._metric.threshold}
        if issubclass(self._class, QcomNumericalComparatorBase):
            limits |= {"edge_ep": edge}
        try:
            comparator = self._class(**limits)
            name = comparator.metric_name() if hasattr(comparator, "metric_name") else self._metric.name
        except Exception as error:
            raise UsageError(f"--metric {self._metric}: {reason_of(error)}") from error
        return BoundMetric(self._metric, re.sub(r"[^\w.-]+", "_", str(name))[:_NAME_LIMIT], comparator)


class BoundMetric:
    """A comparator of the user's for one program."""

    def __init__(self, metric: UserMetric, name: str, comparator: Any) -> None:
        self.name = name
        """What its figures are called."""
        self._metric, self._comparator = metric, comparator

    def score(self, layer: str, before: torch.Tensor, after: torch.Tensor) -> Score:
        """Return what it says of `after`, two tensors of one shape in torch's layout. Raises UsageError for its errors.

        What is equal is valid whatever the number, which is NaN of two tensors of zeros.
        """
        try:
            value = float(self._comparator.element_compare(before, after))
            judge = getattr(self._comparator, "is_valid_score", None)
            valid = None if judge is None else bool(judge(value)) or torch.equal(before, after)
        except Exception as error:
            raise UsageError(f"--metric {self._metric}: at {layer}: {reason_of(error)}") from error
        return Score(value, valid)


def bind_all(classes: Sequence[MetricClass], edge: ExportedProgram) -> list[BoundMetric]:
    """Return the comparators for a program. Raises UsageError where two have the same name."""
    bound = [one.bind(edge) for one in classes]
    names = [one.name for one in bound]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--metric: two comparators are called {twice}: give one another metric_name()")
    return bound


def scores_of(
    metrics: Sequence[BoundMetric], layer: str, before: torch.Tensor, after: torch.Tensor
) -> dict[str, Score]:
    """Return what `metrics` say of a layer, by their names."""
    scores = {metric.name: metric.score(layer, before, after) for metric in metrics}
    return {name: score for name, score in scores.items() if score.valid is not None or not math.isnan(score.value)}


def _import(metric: UserMetric, case: Case) -> ModuleType:
    name = import_name(metric.module, case.folder)
    try:
        if not metric.module.startswith("."):
            _require_own_files(metric)
        return importlib.import_module(name)
    except UsageError:
        raise
    except Exception as error:
        # Whatever the code of a module raises.
        raise UsageError(f"--metric {metric}: {metric.module} cannot be imported: {reason_of(error)}") from error


def _require_own_files(metric: UserMetric) -> None:
    """Raise UsageError where somebody else could have written a module on the way to that of `metric`.

    Those beside a suite are as good as its modules, and those of the toolchain's interpreter as good as it.
    """
    parts = metric.module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        # The packages above it, which this imports, were looked at before.
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise no_module(metric, name)
        for place in (Path(place) for place in [spec.origin, *(spec.submodule_search_locations or ())] if place):
            own = not place.is_absolute() or any(place.is_relative_to(each) for each in (sys.prefix, sys.base_prefix))
            if not own and (problem := weakness(place)):
                raise UsageError(f"--metric {metric}: {place} is not executed: {problem}")
