"""Tasks in lm-eval's format: their files, and the questions that their templates make of data."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from farm.base.errors import ConfigError
from farm.base.paths import require_inside

if TYPE_CHECKING:
    import jinja2


# Multiple choice task in the YAML of lm-eval (EleutherAI's lm-evaluation-harness 0.4), read by farm. Torch-free.
#
# No code of a task runs, and nothing is downloaded. An unsupported key that could change a number is refused by its
# name; keys without an effect are in _WITHOUT_EFFECT.


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


# The questions of a task: what stands before the choices, the choices, and the right ones, as lm-eval makes them.


_MOST_SHOWN = 60


class WrittenQuestion(msgspec.Struct, frozen=True):
    """A question in words."""

    text: str
    """All that stands before a choice, but for the delimiter."""
    choices: tuple[str, ...]
    right: tuple[int, ...]
    """Indices of the choices any of which is right."""


def written_questions(task: TaskFile, most: int | None) -> list[WrittenQuestion]:
    """Return the first `most` questions of `task`, all with None. Raises ConfigError for what makes no question."""
    documents = list(_documents(task, most))
    if not documents:
        raise ConfigError(task.path, "dataset_path", "has no question")
    columns = dict.fromkeys(name for document in documents for name in document)
    asker = _Asker(task, frozenset(columns))
    empty = dict.fromkeys(columns)
    return [asker.question(number, {**empty, **document}) for number, document in enumerate(documents)]


def _documents(task: TaskFile, most: int | None) -> Iterator[dict[str, Any]]:
    count = 0
    for path in task.data:
        for document in _rows(path):
            if count == most:
                return
            if not isinstance(document, dict):
                raise ConfigError(path, "", f"question {count} is {_shown(document)}, expected a JSON object")
            count += 1
            yield document


def _rows(path: Path) -> Iterator[object]:
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(path, "", f"is neither a list of JSON objects nor one on each line: {error}") from None
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None


class _Asker:
    """Makes questions of documents, with the templates of one task."""

    def __init__(self, task: TaskFile, columns: frozenset[str]) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._task, self._columns = task, columns
        # As lm-eval's own, but that a template can neither reach Python's insides nor change a document.
        self._templates = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
        )
        self._templates.filters["regex_replace"] = _regex_replace
        self._compiled: dict[str, jinja2.Template] = {}

    def question(self, number: int, document: Mapping[str, Any]) -> WrittenQuestion:
        """Return the question that a document asks."""
        text = self._value("doc_to_text", self._task.doc_to_text, number, document)
        if not isinstance(text, str) or (text.isdigit() and self._task.doc_to_text not in self._columns):
            problem = "farm has choices after one text alone, no texts before one choice"
            raise self._refusal("doc_to_text", number, text, f"expected a text: {problem}")
        choices = self._choices(number, document)
        target = self._value("doc_to_target", self._task.doc_to_target, number, document)
        before = self._rendered("description", self._task.description, number, document)
        return WrittenQuestion(before + text, choices, self._right(number, target, choices))

    def _value(self, key: str, given: object, number: int, document: Mapping[str, Any]) -> object:
        """Return the value of the column of that name, the result of a template, or the given value itself."""
        if not isinstance(given, str):
            return given
        return document[given] if given in self._columns else self._rendered(key, given, number, document)

    def _choices(self, number: int, document: Mapping[str, Any]) -> tuple[str, ...]:
        key, given = "doc_to_choice", self._task.doc_to_choice
        found = self._value(key, given, number, document)
        if isinstance(given, str) and given not in self._columns:
            try:
                found = ast.literal_eval(str(found))
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise self._refusal(key, number, found, "expected a template that gives a list of texts") from None
        if isinstance(found, dict):
            found = list(found.values())
        if not isinstance(found, list) or len(found) < 2 or not all(isinstance(one, str) and one for one in found):
            raise self._refusal(key, number, found, "expected a list of two texts or more, none of them empty")
        return tuple(found)

    def _right(self, number: int, target: object, choices: Sequence[str]) -> tuple[int, ...]:
        given = self._task.doc_to_target
        if isinstance(target, str) and not (isinstance(given, str) and given in self._columns):
            target = _literal(target)
        listed = target if isinstance(target, list) else [target]
        found = [choices.index(one) if isinstance(one, str) and one in choices else one for one in listed]
        indices = [one for one in found if type(one) is int and 0 <= one < len(choices)]
        if not indices or len(indices) < len(found):
            problem = f"expected a choice, or its index, 0 to {len(choices) - 1}"
            raise self._refusal("doc_to_target", number, target, problem)
        return tuple(dict.fromkeys(indices))

    def _rendered(self, key: str, template: str, number: int, document: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            if template not in self._compiled:
                self._compiled[template] = self._templates.from_string(template)
            return self._compiled[template].render(**document)
        except TemplateError as error:
            raise ConfigError(self._task.path, key, f"question {number}: {error}") from None
        except Exception as error:  # noqa: BLE001 - whatever a template of the user's does with the user's data
            raise ConfigError(self._task.path, key, f"question {number}: {type(error).__name__}: {error}") from None

    def _refusal(self, key: str, number: int, value: object, problem: str) -> ConfigError:
        return ConfigError(self._task.path, key, f"question {number} has {_shown(value)}, {problem}")


def _literal(text: str) -> object:
    """Return the number or the list that a template has written, else the text."""
    if text.isdigit() or (text.startswith("[") and text.endswith("]")):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    return text


def _regex_replace(string: str, pattern: str, repl: str, count: int = 0) -> str:
    return re.sub(pattern, repl, string, count=count)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
