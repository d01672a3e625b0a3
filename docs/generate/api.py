"""docs/reference/api.md, from the docstrings of what a project imports."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import outbox
from docs.generate.markdown import code, document, table
from docs.generate.source import comments_of_names

INTRODUCTION = """
What a project imports. Nothing else is public: other modules may change with any release. Errors have
[a page of their own](errors.md), and so have [settings](settings.md) and [commands](commands.md).
"""

# Beside the names of `outbox` itself: where they are imported from.
SECTIONS = {
    "Publish": ["outbox.publish", "outbox.apublish", "outbox.publish_many", "outbox.Envelope", "outbox.publish_raw",
        "outbox.atomic", "outbox.transactional", "outbox.Receipt"],
    "Message types": ["outbox.Message"],
    "Consume": ["outbox.consumer", "outbox.RetryPolicy", "outbox.Context", "outbox.errors.TimeLimitExceeded",
        "outbox.update_if", "outbox.update_or_raise", "outbox.RedisIdempotencyKey"],
    "Send Celery's tasks": ["outbox.celery.send_in_transaction", "outbox.celery.OutboxTask"],
    "Answer check-backs": ["outbox.check_back", "outbox.check_backs.Resolution"],
    "Show messages in the admin": ["outbox.admin.MessagesAboutMixin"],
    "Extend from an app": ["outbox.extensions.Extension", "outbox.findings.Finding", "outbox.extensions.Page",
        "outbox.extensions.RetentionHold"],
    "Run": ["outbox.schedule.beat_schedule", "outbox.pipeline.schedule.pipeline_schedule"],
    "Test": ["outbox.testing.Outbox", "outbox.testing.OutboxTestMixin"],
}  # fmt: skip

SIGNALS = """
From `outbox.signals`, by Django's dispatcher. They are sent with `send_robust`: a listener's error is logged and hurts nobody.
"""

LISTED = ("Args", "Raises")
WIDTH = 110

SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")
ENTRY = re.compile(r"^    (\S[^:]*): ?(.*)$")


def page() -> str:
    """Make the page."""
    parts = [INTRODUCTION.strip()]
    for title, paths in SECTIONS.items():
        parts.append(f"## {title}")
        parts += [part for path in paths for part in _entry(path, find(path))]
    return document(
        "API", "the docstrings", *parts, "## Signals", SIGNALS.strip(), table(["signal", "arguments, and when"], _signals())
    )


def find(path: str) -> Any:
    """Import a name by its path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def documented() -> set[str]:
    """Return the public names of `outbox` that this page or that of the errors tells about."""
    names = {path.removeprefix("outbox.") for paths in SECTIONS.values() for path in paths}
    return names | {name for name in outbox.__all__ if _is_error(getattr(outbox, name))}


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _entry(path: str, value: Any) -> Iterator[str]:
    yield f"### `{path}`"
    if not inspect.isclass(value) or is_dataclass(value):
        yield f"```text\n{value.__name__}{signature(value)}\n```"
    yield docstring(value)
    for name, method in _methods(value):
        yield f"```text\n{name}{signature(method)}\n```"
        yield docstring(method)


def _methods(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the public methods and properties of a class that say what they do, in the order of the source."""
    if not inspect.isclass(value):
        return
    for name, member in vars(value).items():
        function = member.__func__ if isinstance(member, classmethod) else member
        if (
            not name.startswith("_")
            and (inspect.isfunction(function) or isinstance(function, property))
            and inspect.getdoc(function)
        ):
            yield name, function


def signature(value: Any) -> str:
    """Return the parameters as the source has them, one a line where they are many; of a property what it gives."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(value.fget if isinstance(value, property) else value))).body
    if isinstance(node, ast.ClassDef):
        return _in_lines([ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)], "")
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    node.args.args = [one for one in node.args.args if one.arg not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return returns if isinstance(value, property) else _in_lines(_split(node.args), returns)


def _split(parameters: ast.arguments) -> list[str]:
    """Return each parameter by itself."""
    found = re.split(r", (?![^\[(]*[\])])", ast.unparse(parameters))
    return [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", one) for one in found if one]


def _in_lines(parameters: list[str], returns: str) -> str:
    text = f"({', '.join(parameters)}){returns}"
    return text if len(text) <= WIDTH else "(\n" + "".join(f"    {one},\n" for one in parameters) + f"){returns}"


def docstring(value: Any) -> str:
    """Put a docstring into Markdown: its sections become lists, and what it quotes after `::` a block."""
    lines: list[str] = []
    section = ""
    text, _, quoted = (inspect.getdoc(value) or "").partition("::\n")
    for line in text.splitlines():
        if match := SECTION.match(line):
            section = match[1]
            lines += [f"*{section}*", ""]
        elif section in LISTED and (match := ENTRY.match(line)):
            lines.append(f"- {code(match[1])}: {match[2]}")
        else:
            lines.append(f"  {line.strip()}" if section in LISTED and line.startswith("     ") else line.removeprefix("    "))
    if quoted:
        lines[-1] += ":"
        lines += ["", "```text", *textwrap.dedent(quoted.strip("\n")).splitlines(), "```"]
    return "\n".join(lines)


def _signals() -> Iterator[tuple[str, str]]:
    for name, comment in comments_of_names("outbox/signals.py"):
        yield code(name), comment
