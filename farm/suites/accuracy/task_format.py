"""Multiple choice task in the YAML of lm-eval (EleutherAI's lm-evaluation-harness 0.4), read by farm. Torch-free.

No code of a task runs, and nothing is downloaded. An unsupported key that could change a number is refused by its name;
keys without an effect are in _WITHOUT_EFFECT.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from farm.base.errors import ConfigError
from farm.base.paths import require_inside

METRICS = ("acc", "acc_norm")
_SUFFIXES = (".json", ".jsonl")
_READ = frozenset({
    "output_type", "dataset_path", "dataset_kwargs", "test_split", "validation_split", "doc_to_text", "doc_to_choice",
    "doc_to_target", "target_delimiter", "description", "metric_list", "include",
})  # fmt: skip
# Keys of names, remarks and few-shot examples, which have no effect here.
_WITHOUT_EFFECT = frozenset({
    "task", "task_alias", "tag", "metadata", "training_split", "fewshot_split", "fewshot_delimiter", "fewshot_config",
    "should_decontaminate", "doc_to_decontamination_query",
})  # fmt: skip
# Keys that are accepted with their default values alone.
_USUAL = {"num_fewshot": (None, 0), "repeats": (None, 1), "dataset_name": (None,), "process_docs": (None,)}
# Types of the keys that make a question.
_KINDS: dict[str, tuple[type, ...]] = {
    "doc_to_text": (str,),
    "doc_to_choice": (str, list, dict),
    "doc_to_target": (str, int, list),
    "target_delimiter": (str,),
    "description": (str,),
}
_DEFAULTS = {"target_delimiter": " ", "description": ""}
_INSTEAD = {
    "num_fewshot": "examples before a question are not drawn here: write them into description",
    "process_docs": "it is Python code, which is not run: change the data, or write a template",
    "dataset_name": "is for data sets that are downloaded: name files in dataset_kwargs.data_files",
    "group": "a group has tasks of its own: name each in a case",
}
_MOST_INCLUDES = 16
_MOST_FILES = 256
_MOST_BYTES = 1 << 20
_MOST_ALIASES = 16


class TaskFile(msgspec.Struct, frozen=True):
    """Task with its included files."""

    path: Path
    files: tuple[Path, ...]
    """Files that decide the result: the YAML files and the data."""
    data: tuple[Path, ...]
    doc_to_text: str
    doc_to_choice: Any
    """A column or a template (str), a list, or a table whose values count."""
    doc_to_target: Any
    """A column or a template (str), an index, or a list of these."""
    target_delimiter: str
    description: str
    metrics: tuple[str, ...] = METRICS


def read_task(path: Path, inside: Path | None = None) -> TaskFile:
    """Return the task in `path`, whose files are in the folder `inside`.

    Raises ConfigError with file and key for unsupported settings, and for a file elsewhere.
    """
    table, files = _with_includes(path, (), inside, [])
    for key, value in table.items():
        if key not in _READ | _WITHOUT_EFFECT and value not in _USUAL.get(key, ()):
            why = _INSTEAD.get(key, "farm does not know it, and leaving it out could change the numbers")
            raise ConfigError(path, str(key), why)
    if table.get("output_type") != "multiple_choice":
        problem = f"is {table.get('output_type')!r}, expected 'multiple_choice': a text is scored with score_text"
        raise ConfigError(path, "output_type", problem)
    texts: dict[str, Any] = {key: table.get(key, _DEFAULTS.get(key)) for key in _KINDS}
    for key, value in texts.items():
        if value is None and key not in _DEFAULTS:
            problem = "is missing: a task names its questions, choices and right choices by the keys doc_to_..."
            raise ConfigError(path, key, problem)
        if not isinstance(value, _KINDS[key]):
            raise ConfigError(path, key, f"is {value!r}, expected a text, the name of a column, or the value itself")
    data = _data_of(path, table, inside)
    return TaskFile(
        path=path,
        files=(*files, *data),
        data=data,
        **texts,
        metrics=_metrics_of(path, table.get("metric_list")),
    )


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain values alone, with few aliases: nested ones double a value with each line."""

    aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node."""
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > _MOST_ALIASES:
                raise ValueError(f"has more than {_MOST_ALIASES} aliases (*name): write the values")
        return super().compose_node(parent, index)


def _refuse_tag(_loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> None:
    raise ValueError(f"line {node.start_mark.line + 1}: !{suffix} runs Python code, which is not run: write a template")


_Loader.add_multi_constructor("!", _refuse_tag)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(path, "", f"is larger than {_MOST_BYTES} bytes: data belong into dataset_path")
        found = yaml.load(content, _Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(path, "", f"is no YAML: {' '.join(str(error).split())}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(path, "", str(error)) from None
    if not isinstance(found, dict):
        raise ConfigError(path, "", "has no table with the keys of a task")
    return found


def _with_includes(
    path: Path, including: tuple[Path, ...], inside: Path | None, read: list[Path]
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Return the keys of `path` over the keys of its included files, whose first file overrides the others."""
    if path.resolve() in including or len(including) > _MOST_INCLUDES:
        raise ConfigError(path, "include", "the files include each other in a circle")
    read.append(path)
    if len(read) > _MOST_FILES:
        raise ConfigError(path, "include", f"the task reads more than {_MOST_FILES} files")
    own = _read_yaml(path)
    named = own.pop("include", None) or []
    merged: dict[str, Any] = {}
    files = [path]
    for name in reversed([named] if isinstance(named, str) else list(named)):
        if not isinstance(name, str):
            raise ConfigError(path, "include", f"is {name!r}, expected the path of a YAML file")
        require_inside(path, "include", path.parent / name, inside)
        table, below = _with_includes(path.parent / name, (*including, path.resolve()), inside, read)
        merged |= table
        files += below
    return {**merged, **own}, tuple(dict.fromkeys(files))


def _data_of(path: Path, table: Mapping[str, Any], inside: Path | None) -> tuple[Path, ...]:
    """Return the files of the questions: of the split for tests, else of that for validation, as in lm-eval."""
    named = table.get("dataset_path")
    given = table.get("dataset_kwargs") or {}
    if not isinstance(given, dict):
        raise ConfigError(path, "dataset_kwargs", f"is {given!r}, expected a table with data_files")
    if odd := sorted(map(str, set(given) - {"data_files"})):
        raise ConfigError(path, f"dataset_kwargs.{odd[0]}", "only data_files is known here: leave it out")
    split = table.get("test_split") or table.get("validation_split")
    if named == "json":
        files = given.get("data_files")
        if isinstance(files, dict):
            if not isinstance(split, str) or split not in files:
                raise ConfigError(path, "test_split", f"is {split!r}, and data_files has {', '.join(map(str, files))}")
            files = files[split]
        elif split not in (None, "train"):
            # `datasets` gives files without a split the name 'train'.
            raise ConfigError(path, "test_split", f"is {split!r}: files without a split are called 'train'")
    elif isinstance(named, str) and named.endswith(_SUFFIXES):
        files = named
    else:
        problem = f"is {named!r}, and nothing is downloaded: give 'json', with dataset_kwargs.data_files, or a file"
        raise ConfigError(path, "dataset_path", problem)
    listed = [files] if isinstance(files, str) else files
    if not isinstance(listed, list) or not listed or not all(isinstance(one, str) for one in listed):
        raise ConfigError(path, "dataset_kwargs.data_files", f"is {files!r}, expected files beside the task")
    found = []
    for one in listed:
        file = path.parent / one
        require_inside(path, "dataset_kwargs.data_files", file, inside)
        if not one.endswith(_SUFFIXES) or not file.is_file():
            problem = f"{one!r} is no .json or .jsonl file; it is looked for in {path.parent}"
            raise ConfigError(path, "dataset_kwargs.data_files", problem)
        found.append(file)
    return tuple(found)


def _metrics_of(path: Path, listed: object) -> tuple[str, ...]:
    if listed is None:
        return METRICS
    if listed == []:
        raise ConfigError(path, "metric_list", "is empty: name one, or leave it out")
    found = []
    for index, one in enumerate(listed if isinstance(listed, list) else [listed]):
        key = f"metric_list[{index}]"
        if not isinstance(one, dict) or one.get("metric") not in METRICS:
            name = one.get("metric") if isinstance(one, dict) else one
            raise ConfigError(path, key, f"is {name!r}, and of multiple choice farm has {' and '.join(METRICS)}")
        usual = {"metric": one["metric"], "aggregation": "mean", "higher_is_better": True}
        if odd := [name for name, value in one.items() if name not in usual or value != usual[name]]:
            raise ConfigError(path, f"{key}.{odd[0]}", "is another than lm-eval's own: leave it out")
        found.append(one["metric"])
    return tuple(dict.fromkeys(found))
