"""What the source of a class says of its attributes: annotations, values, and the comments behind or above them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOQA = re.compile(r"noqa: [A-Z0-9]+(?:\s+\((.*)\))?$")


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute as it is written. `comment`: behind it, else above it."""

    name: str
    annotation: str
    value: str
    comment: str


def docstring(path: str, name: str) -> str:
    """Return the docstring of a class."""
    return ast.get_docstring(_class(path, name)) or ""


def attributes(path: str, name: str) -> Iterator[Attribute]:
    """Return the attributes of a class, in order, its inner classes and methods apart."""
    comments = _comments(path)
    for node in _class(path, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = ast.unparse(node.value) if node.value else ""
            yield Attribute(node.target.id, ast.unparse(node.annotation), value, _comment(comments, node))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield Attribute(node.targets[0].id, "", ast.unparse(node.value), _comment(comments, node))


def _comment(comments: dict[int, tuple[bool, str]], node: ast.stmt) -> str:
    assert node.end_lineno is not None
    behind = comments.get(node.end_lineno)
    if behind is not None:
        return behind[1]
    above: list[str] = []
    line = node.lineno - 1
    while line in comments and comments[line][0]:
        above.insert(0, comments[line][1])
        line -= 1
    return " ".join(above)


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def _class(path: str, name: str) -> ast.ClassDef:
    return next(node for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef) and node.name == name)


@cache
def _comments(path: str) -> dict[int, tuple[bool, str]]:
    """Return comments by line, and whether each has the line to itself; what is meant for linters is left out."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.removeprefix("#").strip()
            if match := NOQA.match(text):
                text = match[1] or ""
            found[token.start[0]] = token.line[: token.start[1]].strip() == "", text
    return found
