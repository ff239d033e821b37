"""Schemas of the export formats, after their documentation, limited to the parts that farm writes.

The benchmark database: the types of its columns, oss_ci_benchmark_v3 of pytorch/test-infra.
Traces: "Trace Event Format", complete events and metadata.
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
ANYTHING = {"type": "object"}


def closed(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """Return the schema of an object that has nothing else."""
    properties = {**required, **optional}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def _checker(schema: dict[str, Any]) -> Any:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def listed(item: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, **more}


_NAME = {"type": "string", "minLength": 1}

# The database's Map(String, String).
_STRINGS = {"type": "object", "additionalProperties": TEXT}
_UINT32 = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_HUD_BENCHMARK = closed({"name": TEXT, "mode": TEXT, "dtype": TEXT, "extra_info": _STRINGS})
_HUD_MODEL = closed(
    {**dict.fromkeys(("name", "type", "backend"), TEXT), "origins": listed(TEXT), "extra_info": _STRINGS}
)
_HUD_INPUT = closed({"dtype": TEXT, "extra_info": _STRINGS})
_HUD_METRIC = closed({
    "name": _NAME, "benchmark_values": listed({"type": "number"}, minItems=1), "target_value": {"type": "number"},
    "extra_info": _STRINGS,
})  # fmt: skip
_HUD_RUNNER = closed({
    **dict.fromkeys(("name", "type", "cpu_info"), TEXT),
    **dict.fromkeys(("avail_mem_in_gb", "total_mem_in_gb"), _UINT32), "extra_info": _STRINGS,
})  # fmt: skip
_HUD_DEPENDENCY = closed({**dict.fromkeys(("repo", "branch", "sha", "version"), TEXT), "extra_info": _STRINGS})
_HUD_DEPENDENCIES = {"type": "object", "required": ["executorch"], "additionalProperties": _HUD_DEPENDENCY}
HUD = _checker(listed(closed({
    "benchmark": _HUD_BENCHMARK, "model": _HUD_MODEL, "metric": _HUD_METRIC,
    "inputs": {"type": "object", "additionalProperties": _HUD_INPUT}, "runners": listed(_HUD_RUNNER, minItems=1),
    "dependencies": _HUD_DEPENDENCIES,
})))  # fmt: skip

_METADATA = closed({
    "ph": {"const": "M"}, "name": {"enum": ["process_name", "thread_name"]}, "pid": INTEGER, "tid": INTEGER,
    "args": closed({"name": TEXT}),
})  # fmt: skip
_TIME = {"type": "number", "minimum": 0}
_COMPLETE = closed({
    "ph": {"const": "X"}, "name": _NAME, "cat": _NAME, "pid": INTEGER, "tid": INTEGER, "ts": _TIME, "dur": _TIME,
    "args": ANYTHING,
})  # fmt: skip
TRACE = _checker(closed({
    "traceEvents": listed({"oneOf": [_METADATA, _COMPLETE]}), "displayTimeUnit": {"enum": ["ms", "ns"]},
    "otherData": _STRINGS,
}))  # fmt: skip

# JUnit after Jenkins' junit-10.xsd: attributes by element, required ones first, and the elements inside.
# Additions: `properties` of a test case, as pytest and Surefire write them, and `skipped` of all suites together.
JUNIT: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors", "skipped"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"time", "skipped", "timestamp", "hostname", "id", "package"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name"},
        {"time", "classname", "group"},
        {"properties", "skipped", "error", "failure", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    **{name: (set(), {"type", "message"}, set()) for name in ("failure", "error", "skipped")},
    **{name: (set(), set(), set()) for name in ("system-out", "system-err")},
}
