"""The questions of a task: what stands before the choices, the choices, and the right ones, as lm-eval makes them."""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from farm.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.suites.accuracy.task_format import TaskFile

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
        if isinstance(target, str) and not (isinstance(self._task.doc_to_target, str) and self._is_column()):
            target = _literal(target)
        listed = target if isinstance(target, list) else [target]
        found = [choices.index(one) if isinstance(one, str) and one in choices else one for one in listed]
        indices = [one for one in found if type(one) is int and 0 <= one < len(choices)]
        if not indices or len(indices) < len(found):
            problem = f"expected a choice, or its index, 0 to {len(choices) - 1}"
            raise self._refusal("doc_to_target", number, target, problem)
        return tuple(dict.fromkeys(indices))

    def _is_column(self) -> bool:
        return self._task.doc_to_target in self._columns

    def _rendered(self, key: str, template: str, number: int, document: Mapping[str, Any]) -> str:
        try:
            if template not in self._compiled:
                self._compiled[template] = self._templates.from_string(template)
            return self._compiled[template].render(**document)
        except jinja2.TemplateError as error:
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
