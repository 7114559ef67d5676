"""Finds language that readers stumble over: banned names, words and openings, and sentences that are too long.

`python tests/language.py PATH…` lists what it finds in those files or folders.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_WORDS = 25
"""Longest sentence, in words. A colon or a semicolon ends a sentence here."""

_VAGUE = "found place places own together beside given said told wanted since far chance last worth climb rung ladder"
BANNED_NAMES = frozenset(_VAGUE.split())
"""Names of variables, arguments, functions and classes that do not say what the value is."""

BANNED_OPENINGS = ("Of", "What", "Where", "That", "Such", "Those", "Beside", "In how", "By how", "As how", "Whose")
"""First words of a docstring that opens as a fragment."""

BANNED_PHRASES = (
    r"beside\b",
    r"surer\b",
    r"\bdealt\b",
    r"\blest\b",
    r"\b(?:there|where|here)(?:of|upon|to)\b",
    r"\brungs?\b",
    r"\bladders?\b",
    r"\bclimb(?:s|ed|ing)?\b",
    r"speaks? (?:for|against)\b",
    r"\bstands? (?:beside|for itself|in brackets|wherever)\b",
    r"\b(?:is|are|was|were|be) (?:told|asked of|said of|taken as it is|judged by)\b",
    r"\bof (?:few|several|fewer|many|so many) (?:rows|labels|samples|images|classes|clusters|seeds|draws)\b",
    r"\bso (?:many|few) (?:rows|labels|samples|images|times|classes|of)\b",
    r"\b(?:one|two|three|four|once|twice|\d+|number|numbers|name|value|probability|label|column|file|line|pass|process|"
    r"map|fit|temperature|bias|weight|threshold|figure|picture|answer) an? (?:row|method|class|file|network|seed|model|"
    r"fold|bin|group|cluster|sample|image|label|draw|run|line|page|shard|column|batch|epoch|step|question|pixel|token)\b",
    r"\bof (?:most|least|more|less) (?:likelihood|loss|gain|error)\b",
    r"\bmakes? (?:it|them|itself) (?:so )?sure\b",
    r"\bnothing (?:to tell|speaks|then|else to)\b",
    r"\bwhat (?:of|is left of)\b",
    r"\bwhich it (?:has|is|was) (?:of|not)\b",
    r"\bno more is asked\b",
    r"\bby heart\b",
    r"\b(?:it|they) (?:says?|tells?) of\b",
    r"\bas is so\b",
    r"\bwhole way\b",
    r"\b(?:is|are) (?:so|such) (?:too|also)\b",
    r"\bof its own (?:accord|making)\b",
    r"\bgoes? without\b",
)
"""Phrases of a private dialect, as regular expressions; capitals do not matter."""

_BANNED = re.compile("|".join(f"(?:{phrase})" for phrase in BANNED_PHRASES), re.IGNORECASE)
_OPENING = re.compile(rf"(?:{'|'.join(BANNED_OPENINGS)})\b")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])[\s)”\"]+|\n\s*\n|\s+[–—]\s+|\n\s*[-*•\d]+[.)]?\s")
_SECTION = re.compile(r"^[ ]*(?:[A-Z][A-Za-z ]+)\n[ ]*-{3,}[ ]*$", re.MULTILINE)


class Finding(NamedTuple):
    """One place that a reader stumbles over."""

    path: str
    line: int
    problem: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}: {self.text}"


def scan(path: Path) -> list[Finding]:
    """Return the findings in a Python or Markdown file."""
    return list(_scan_python(path) if path.suffix == ".py" else _scan_markdown(path))


def scan_all(paths: list[Path]) -> list[Finding]:
    """Return the findings in files and folders."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [finding for file in files if file.suffix in (".py", ".md") for finding in scan(file)]


def _scan_python(path: Path) -> Iterator[Finding]:
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = {id(node): is_first for node, is_first in _docstrings(tree)}
    for node in ast.walk(tree):
        for name, line in _names(node):
            if name.strip("_").lower() in BANNED_NAMES:
                yield Finding(str(path), line, "name", name)
        if id(node) in docstrings:
            text = node.value.value  # type: ignore[attr-defined]
            if _OPENING.match(text.strip()):
                yield Finding(str(path), node.lineno, "opening", text.strip().split("\n")[0])
            yield from _check_text(str(path), node.lineno, _prose_of_docstring(text))
    values = {id(node.value) for node in ast.walk(tree) if id(node) in docstrings}
    for line, text in _messages(tree, values):
        yield from _check_text(str(path), line, text)
    for line, text in _comments(source):
        yield from _check_text(str(path), line, text)


def _scan_markdown(path: Path) -> Iterator[Finding]:
    text = re.sub(r"(```|~~~).*?\1", _blank, path.read_text(), flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$|<!--.*?-->|^---\n.*?\n---$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    lines = ["" if re.match(r"\s*(?:\||<|#|>>>|\.\.\.|!\[|:::|    )", line) else line for line in text.split("\n")]
    paragraph: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield from _check_text(str(path), number - len(paragraph), "\n".join(paragraph))
            paragraph = []


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def _check_text(path: str, line: int, text: str) -> Iterator[Finding]:
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for match in _BANNED.finditer(re.sub(r"`[^`]*`", lambda code: "x" * len(code.group()), text)):
        context = " ".join(text[max(match.start() - 30, 0) : match.end() + 30].split())
        yield Finding(path, line + text.count("\n", 0, match.start()), "phrase", context)
    start = 0
    for sentence in _SENTENCE_END.split(text):
        position = text.find(sentence, start)
        start = position + len(sentence)
        words = re.findall(r"[A-Za-z][\w’'./-]*", re.sub(r"`+[^`]*`+|\$[^$]*\$|\([^()]*\)", "code", sentence))
        if len(words) > MAX_WORDS:
            yield Finding(path, line + text.count("\n", 0, position), f"{len(words)} words", " ".join(sentence.split()))


def _docstrings(tree: ast.AST) -> Iterator[tuple[ast.Expr, bool]]:
    """Yield string statements: docstrings, and those below an attribute (False)."""
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for number, child in enumerate(body if isinstance(body, list) else []):
                if (
                    isinstance(child, ast.Expr)
                    and isinstance(child.value, ast.Constant)
                    and isinstance(child.value.value, str)
                ):
                    yield child, number == 0


def _prose_of_docstring(text: str) -> str:
    """Return a docstring without examples, section heads and names of parameters; line numbers stay."""
    text = _SECTION.sub(_blank_lines, text)
    text = re.sub(r"^[ ]*\$ .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[ ]*(?:>>>|\.\.\.).*(?:\n(?![ ]*$|[ ]*>>>|[ ]*\.\.\.).*)*", _blank_lines, text, flags=re.MULTILINE)
    return re.sub(r"^([ ]*)[\w*, ]+(?: : .*)?\n(?=\1    \S)", "\n\n", text, flags=re.MULTILINE)


def _blank_lines(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def _names(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node.lineno


def _messages(tree: ast.AST, docstrings: set[int]) -> Iterator[tuple[int, str]]:
    """Yield strings of five words or more that are no docstrings; the values inside an f-string count as one word."""
    inside = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values]
            text = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docstrings:
            text = node.value
        else:
            continue
        if len(text.split()) >= 5 and "<" not in text and ">>>" not in text:
            yield node.lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    start = previous = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != previous + 1:
            yield start, "\n".join(block)
            block = []
        if not block:
            start = token.start[0]
        block.append(token.string.lstrip("# "))
        previous = token.start[0]
    if block:
        yield start, "\n".join(block)


if __name__ == "__main__":
    findings = scan_all([Path(name) for name in sys.argv[1:]])
    print(*findings, f"{len(findings)} findings", sep="\n")
