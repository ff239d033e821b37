"""SQNR of layers, and comparators of the user (`farm debug --comparator`): import, scores. Imports executorch.

A user's code runs only here, in the compiler process. A comparator gets tensors that are dequantized and in torch's
layout, so that it need not do what ExecuTorch's comparators do before they compare.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from executorch.backends.qualcomm.debugger.qcom_numerical_comparator_base import QcomNumericalComparatorBase
from executorch.devtools.inspector.numerical_comparator import NumericalComparatorBase
from torch.export import ExportedProgram

from farm.base.errors import UsageError
from farm.base.files import weakness
from farm.builds.compile.debug.protocol import UserMetric, no_module, refusal
from farm.builds.compile.flows.factory import import_name
from farm.builds.compile.protocol import reason_of
from farm.builds.program.layers import Score
from farm.suites.suite import Case

_NAME_LIMIT = 40


class MetricClass:
    """Class that a `--comparator` names."""

    def __init__(self, metric: UserMetric, case: Case) -> None:
        """Import the class. Raises UsageError if that fails, and for a file that another user could have written."""
        self._metric = metric
        module = _import(metric, case)
        found = getattr(module, metric.name, None)
        if found is None:
            raise refusal(metric, f"{metric.module} has no class {metric.name}")
        if not inspect.isclass(found) or not issubclass(found, NumericalComparatorBase):
            base = "QcomNumericalComparatorBase of executorch.backends.qualcomm.debugger.qcom_numerical_comparator_base"
            raise refusal(metric, f"{metric.name} is no comparator: derive a class from {base}")
        self._class: Any = found
        self._origin = Path(module.__file__) if module.__file__ else None

    @property
    def note(self) -> str:
        """Note in the result about the code of the comparator."""
        if self._origin is None:
            return f"metric {self._metric}"
        digest = hashlib.sha256(self._origin.read_bytes()).hexdigest()
        return f"metric {self._metric}: {self._origin.name} with SHA-256 {digest[:16]}"

    def bind(self, edge: ExportedProgram) -> BoundMetric:
        """Return the comparator for a program. Raises UsageError if the class cannot be instantiated."""
        limits = {} if self._metric.threshold is None else {"threshold": self._metric.threshold}
        if issubclass(self._class, QcomNumericalComparatorBase):
            limits |= {"edge_ep": edge}
        try:
            comparator = self._class(**limits)
            name = comparator.metric_name() if hasattr(comparator, "metric_name") else self._metric.name
        except Exception as error:
            raise refusal(self._metric, reason_of(error)) from error
        return BoundMetric(self._metric, re.sub(r"[^\w.-]+", "_", str(name))[:_NAME_LIMIT], comparator)


class BoundMetric(NamedTuple):
    """Comparator of the user for one program."""

    metric: UserMetric
    name: str
    """Name of its scores."""
    comparator: Any

    def score(self, layer: str, before: torch.Tensor, after: torch.Tensor) -> Score:
        """Return the score of `after` against `before`, both of one shape and in torch's layout.

        Equal tensors are valid for any score, which is NaN for two tensors of zeros. Raises UsageError for the
        comparator's exceptions.
        """
        try:
            value = float(self.comparator.element_compare(before, after))
            judge = getattr(self.comparator, "is_valid_score", None)
            valid = None if judge is None else bool(judge(value)) or torch.equal(before, after)
        except Exception as error:
            raise refusal(self.metric, f"at {layer}: {reason_of(error)}") from error
        return Score(value, valid)


def bind_all(classes: Sequence[MetricClass], edge: ExportedProgram) -> list[BoundMetric]:
    """Return the comparators for a program. Raises UsageError if two have the same name."""
    bound = [one.bind(edge) for one in classes]
    names = [one.name for one in bound]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--comparator: two comparators are called {twice}: give one another metric_name()")
    return bound


def scores_of(
    metrics: Sequence[BoundMetric], layer: str, before: torch.Tensor, after: torch.Tensor
) -> dict[str, Score]:
    """Return the scores of a layer by the names of `metrics`."""
    scores = {metric.name: metric.score(layer, before, after) for metric in metrics}
    return {name: score for name, score in scores.items() if score.valid is not None or not math.isnan(score.value)}


def sqnr_db(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the SQNR of two different float64 tensors in dB; -inf for a `before` of zeros.

    ExecuTorch's comparators square in float32, where 1e20 overflows: an SQNR of inf, and a cosine of 0.
    """
    signal, noise = float((before**2).sum()), float(((before - after) ** 2).sum())
    if not signal:
        return -math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise)) if noise else math.inf


def _import(metric: UserMetric, case: Case) -> ModuleType:
    name = import_name(metric.module, case.folder)
    try:
        if not metric.module.startswith("."):
            _require_own_files(metric)
        return importlib.import_module(name)
    except UsageError:
        raise
    except Exception as error:
        # The code of a module may raise any exception.
        raise refusal(metric, f"{metric.module} cannot be imported: {reason_of(error)}") from error


def _require_own_files(metric: UserMetric) -> None:
    """Raise UsageError if another user could have written the module of `metric` or a package above it.

    Modules beside a suite are trusted like the suite's own, and modules of the toolchain like its interpreter.
    """
    parts = metric.module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        # The packages above it, which this imports, were checked before.
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise no_module(metric, name)
        for place in (Path(place) for place in [spec.origin, *(spec.submodule_search_locations or ())] if place):
            own = not place.is_absolute() or any(place.is_relative_to(each) for each in (sys.prefix, sys.base_prefix))
            if not own and (problem := weakness(place)):
                raise refusal(metric, f"{place} is not executed: {problem}")
