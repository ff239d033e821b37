"""Selection of jobs by `-k`, as pytest reads it: parts of ids with and, or, not and parentheses."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from farm.base.errors import UsageError

_WORD = re.compile(r"[^\s()]+")
_OPERATORS = ("and", "or", "not")
_LEGAL = (ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Name, ast.Load)


def matching(job_ids: Sequence[str], expression: str) -> list[str]:
    """Return the ids that `expression` selects, without regard to capitals. Raises UsageError for an invalid one."""
    words: list[str] = []

    def name(match: re.Match[str]) -> str:
        if match[0] in _OPERATORS:
            return match[0]
        words.append(match[0].lower())
        return f"w{len(words) - 1}"

    try:
        tree = ast.parse(_WORD.sub(name, expression).strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        tree = None
    if tree is None or not all(isinstance(node, _LEGAL) for node in ast.walk(tree)):
        raise UsageError(f"-k {expression}: expected parts of ids, with and, or, not and parentheses between them")
    return [job_id for job_id in job_ids if _holds(tree, words, job_id.lower())]


def _holds(node: ast.AST, words: Sequence[str], job_id: str) -> bool:
    match node:
        case ast.BoolOp(op=operator, values=values):
            return (all if isinstance(operator, ast.And) else any)(_holds(one, words, job_id) for one in values)
        case ast.UnaryOp(operand=operand):
            return not _holds(operand, words, job_id)
        case ast.Name(id=name):
            return words[int(name.removeprefix("w"))] in job_id
    raise AssertionError(node)
