"""Lists sentences without a named subject in docstrings, comments and documentation.

    python tools/plain_texts.py [PATH ...]      hits below the paths, by default of the whole project
    python tools/plain_texts.py --count         hits per 100 texts of each part of the project

A text is a line of a docstring, a comment, or a line of prose in Markdown. Comments are read in C++, CMake, SQL, shell,
JavaScript, CSS, TOML, YAML and configuration of services as well. Words in backticks and questions are left out.
Messages are the string literals of farm/ with at least four words; their first word belongs to a sentence around them,
so that the rules for the subject do not apply.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    *("farm", "tests", "bench", "tools", "native_runner", "test_suites", "examples", "reports"),
    *("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)
MOST_PER_100 = 3.0
"""Most hits per 100 texts in a part of the project."""
# Rule -> pattern of a text that breaks it.
RULES = {
    "a clause is the subject": r"^(What|Which|Who|Whom|Whose|Whoever|Whatever|Whether|Where|Why)\b",
    "a pronoun is the subject": r"^(It|They|That|Those|One|Such|Its|Of|By|So that)\b",
    "a clause replaces a noun": r"\b[Ww]hat (is|was|has|it|they|goes|comes|a|the|ends|there)\b",
    "a person without a role": r"\b([Ss]ome|[Nn]o|[Aa]ny|[Ee]very)body\b|\b[Ww]h[ao]tever\b|\b[Ww]hoever\b|\bwhom\b",
    "a pronoun before a clause": r"\b(one|those|that) (that|which|of)\b",
    "a program speaks": r"\b(says?|said|tells?|told|hears?|minds?|forgets?|gives? up|wants? to)\b",
    "double negation of time": r"\b(any|no) more\b",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in RULES.items()}
_OF_SUBJECTS = ("a clause is the subject", "a pronoun is the subject")
MESSAGES = "messages"
_LEAST_BLANKS = 3
_HASH = re.compile(r"^\s*#+ ?(?P<words>[^!].*)")
_SLASHES = re.compile(r"((^|\s)//|/\*+)\s*(?P<words>.*?)\s*(\*/|$)")
_DASHES = re.compile(r"(^|\s)--\s+(?P<words>.*)")
_COMMENTS = {
    **dict.fromkeys((".cpp", ".h", ".c", ".js", ".css"), _SLASHES),
    **dict.fromkeys((".cmake", ".txt", ".sh", ".toml", ".yml", ".service", ".timer", ".conf", ".rules", ""), _HASH),
    ".sql": _DASHES,
}
"""Pattern of a line with a comment by the suffix of a file."""
_NOT_PROSE = ("|--", "<!--", "![")
_DIRECTIVES = ("#!", "# noqa", "# type:", "# fmt:", "# shellcheck")


class Text(NamedTuple):
    """Line of a docstring, comment or document."""

    file: str
    line: int
    words: str
    is_message: bool = False

    @property
    def rule(self) -> str:
        """Name of the first broken rule; empty for none."""
        plain = re.sub(r"`[^`]*`", "`x`", self.words)
        # A table of questions has the answer in another cell.
        if "?" in plain.partition("|")[0]:
            return ""
        left_out = _OF_SUBJECTS if self.is_message else ()
        return next((name for name, one in _PATTERNS.items() if name not in left_out and one.search(plain)), "")


def texts(root: Path) -> Iterator[Text]:
    """Yield the texts of a file, or of all files with texts in a folder."""
    for file in [root] if root.is_file() else sorted(root.rglob("*")):
        name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
        if reader := _reader(file):
            for line, words in reader(file):
                yield Text(name, line, words)


def messages(root: Path) -> Iterator[Text]:
    """Yield the string literals of Python files in a folder that are no docstrings, with X in place of each value."""
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_bytes())
        left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        left_out |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            words = "" if id(node) in left_out else _literal(node)
            if words.count(" ") >= _LEAST_BLANKS:
                yield Text(str(file), getattr(node, "lineno", 0), re.sub(r"'[^']*'", "`x`", words), is_message=True)


def _literal(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str() as words):
            return words
        case ast.JoinedStr(values=values):
            return "".join(_literal(value) or "X" for value in values)
    return ""


def hits(found: Sequence[Text]) -> list[Text]:
    """Return the texts that break a rule."""
    return [text for text in found if text.rule]


def _reader(file: Path) -> Callable[[Path], Iterator[tuple[int, str]]] | None:
    if not file.is_file():
        return None
    if file.suffix in (".py", ".md"):
        return _of_python if file.suffix == ".py" else _of_markdown
    has_comments = file.name in ("CMakeLists.txt", "Dockerfile") or file.suffix not in (".txt", "")
    return _of_comments if file.suffix in _COMMENTS and has_comments else None


def _of_comments(file: Path) -> Iterator[tuple[int, str]]:
    pattern = _COMMENTS[file.suffix]
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        found = pattern.search(line)
        if found and found["words"]:
            yield number, found["words"]


def _of_python(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as value)):
                lines = enumerate(value.splitlines(), node.lineno)
                yield from ((line, words.strip()) for line, words in lines if words.strip())
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type == tokenize.COMMENT and not token.string.startswith(_DIRECTIVES):
                yield token.start[0], token.string.strip("# ")


def _of_markdown(file: Path) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.strip()
        is_code ^= words.startswith("```")
        if not is_code and words.strip("`") and not words.startswith(_NOT_PROSE):
            yield number, words.lstrip("#*->| ").strip()


def main(arguments: Sequence[str]) -> int:
    """Print hits or counts; return 1 if a part has more than MOST_PER_100."""
    paths = [Path(one).resolve() for one in arguments if not one.startswith("-")]
    worst = 0.0
    for path in paths or [*(ROOT / part for part in PARTS), ROOT / MESSAGES]:
        found = list(messages(ROOT / "farm") if path == ROOT / MESSAGES else texts(path))
        broken = hits(found)
        rate = 100 * len(broken) / max(1, len(found))
        worst = max(worst, rate)
        if "--count" not in arguments:
            print(*(f"{one.file}:{one.line}: {one.rule}: {one.words[:99]}" for one in broken), sep="\n")  # noqa: T201
        print(f"{path.name}: {len(broken)} of {len(found)} texts, {rate:.1f} per 100")  # noqa: T201
    return int(worst > MOST_PER_100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
