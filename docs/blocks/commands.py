"""docs/reference/commands.md, from the commands' own help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from django.core.management import load_command_class
from django.core.management.base import BaseCommand

from docs.blocks import reasons
from docs.blocks.markdown import code, flat, of_app, table
from docs.blocks.source import ROOT
from outbox.management import exits

INTRODUCTION = """
`python manage.py NAME`. Exit codes mean the same everywhere:

{codes}

Before they begin, commands run the system checks; an error there ends them with 1. Beside what is listed here each takes
Django's own options, such as `--settings`, `--verbosity` and `--traceback`. All but {silent} take `--json`, which prints
one line at the end and nothing else.
"""

FOLDERS = {"outbox": "outbox/management/commands", "outbox.pipeline": "outbox/pipeline/management/commands"}


def page() -> str:
    """Make the page."""
    _, _, codes = (exits.__doc__ or "").strip().partition("\n\n")
    listed = "\n".join(f"- **{number}** {text}" for number, text in _codes(flat(codes)))
    overview = table(["command", "what for"], [[code(name), reasons.COMMANDS[name]] for name in names()])
    parts = [
        INTRODUCTION.strip().format(codes=listed, silent=_without_json()),
        overview,
        *(_section("outbox", name) for name in names_of("outbox")),
    ]
    pipeline = [_section("outbox.pipeline", name) for name in names_of("outbox.pipeline")]
    return "\n\n".join([*parts, *pipeline])


def names() -> list[str]:
    """Return the names of all commands, the outbox's first."""
    return [name for app in FOLDERS for name in names_of(app)]


def names_of(app: str) -> list[str]:
    """Return the names of an app's commands."""
    return sorted(path.stem for path in (ROOT / FOLDERS[app]).glob("outbox_*.py"))


def _without_json() -> str:
    """Return the commands that do not take --json, as text."""
    takes = {
        name: "--json" in load_command_class(app, name).create_parser("manage.py", name).format_help()
        for app in FOLDERS
        for name in names_of(app)
    }
    return ", ".join(code(name) for name, does in takes.items() if not does)


def _codes(text: str) -> Iterator[tuple[str, str]]:
    for number in "012":
        after = text.partition(f"{number}: ")[2]
        end = after.find(f" {int(number) + 1}: ")
        yield number, after[: end if end >= 0 else None]


def _section(app: str, name: str) -> str:
    command = load_command_class(app, name)
    rows = [[code(_shown(action)), action.help or ""] for action in _actions(command, name)]
    help_, _, codes = flat(command.help).partition(" Exit code: ")
    parts = [
        f"## `{name}`",
        *([of_app(app)] if app != "outbox" else []),
        help_,
        *([table(["argument", "meaning"], rows)] if rows else []),
    ]
    return "\n\n".join([*parts, *([f"Exit code: {codes}"] if codes else [])])


def _actions(command: BaseCommand, name: str) -> Iterator[argparse.Action]:
    """Return the command's own arguments, not Django's."""
    djangos = {action.dest for action in BaseCommand().create_parser("manage.py", name)._actions}
    for action in command.create_parser("manage.py", name)._actions:
        if action.dest not in djangos:
            yield action


def _shown(action: argparse.Action) -> str:
    value = str(action.metavar or "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.metavar or "")
    if not action.option_strings:
        return value + ("..." if action.nargs == "*" else "")
    return f"{action.option_strings[-1]} {value}".strip() if action.nargs != 0 else action.option_strings[-1]
