"""What errors, hints and helps of the package tell a user to run or to read is there, also where only the wheel is installed."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from django.core.management import get_commands, load_command_class

from docs.blocks.commands import names

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "outbox").rglob("*.py")) + sorted((ROOT / "outbox").rglob("*.html"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"\boutbox_[a-z_]+\b")
CALL = re.compile(r"manage\.py outbox_[a-z_]+[^`#|]*")
EXTRA = re.compile(r"django-transactional-outbox\[(\w+)\]")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OTHERS_PROGRAMS = ("outbox/testing/postgres.py", "outbox/pipeline/spark/", "outbox/brokers/kafka/server_checks.py")


@cache
def texts(path: Path) -> list[str]:
    """Return the texts of a file that are shown to somebody: all but docstrings, with `{}` where a value is written in."""
    if path.suffix == ".html":
        return [path.read_text()]
    tree = ast.parse(path.read_text())
    return list(_texts(tree, {id(one) for one in _docstrings(tree)}))


def _docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _texts(node: ast.AST, ignored: set[int]) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored:
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _texts(child, ignored)


@cache
def flags_of(command: str) -> set[str]:
    parser = load_command_class(get_commands()[command], command).create_parser("manage.py", command)
    return {flag for action in parser._actions for flag in action.option_strings}


def named(text: str) -> set[str]:
    """Return the commands that a text names."""
    return set(COMMAND.findall(text)) & set(names())


def strange_flags(text: str, own: set[str]) -> list[str]:
    """Return the flags in a text that none of the commands has which it names, or else stands in."""
    known = set().union(*map(flags_of, named(text) | own or names())) | flags_of("migrate")
    return [f"{flag}: {text}" for flag in FLAG.findall(text) if flag not in known]


class TestTheTextsOfThePackage:
    def test_name_no_page_that_the_wheel_does_not_hold(self):
        assert [text for path in SOURCES for text in texts(path) if re.search(r"\bdocs/|\b[\w-]+\.md\b", text)] == []

    def test_name_flags_that_their_commands_have(self):
        unknown = []
        for path in SOURCES:
            if not str(path.relative_to(ROOT)).startswith(OTHERS_PROGRAMS):
                own = {path.stem} & set(names())
                unknown += [strange for text in texts(path) if " " in text for strange in strange_flags(text, own)]

        assert unknown == []

    def test_name_commands_that_exist(self):
        told = {one for path in SOURCES for text in texts(path) for one in re.findall(r"manage\.py (\w+)", text)}

        assert told
        assert told <= set(get_commands())

    def test_name_files_of_the_package_that_exist(self):
        told = {one for path in SOURCES for text in texts(path) for one in re.findall(r"\boutbox/[\w/]+\.py\b", text)}

        assert told
        assert [one for one in sorted(told) if not (ROOT / one).is_file()] == []

    def test_name_extras_that_can_be_installed(self):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        told = {one for path in SOURCES for text in texts(path) for one in EXTRA.findall(text)}

        assert told
        assert told <= set(extras)


class TestTheDocuments:
    def test_give_commands_flags_that_they_have(self):
        unknown = []
        for line in (line for path in DOCUMENTS for line in path.read_text().splitlines()):
            for call in CALL.findall(line):
                unknown += strange_flags(call, set())

        assert unknown == []
