"""Steps that findings name: each command exists, and takes each option that is named with it."""

import ast
import re
from pathlib import Path

from django.apps import apps
from django.core.management import get_commands, load_command_class

import outbox

ROOT = Path(outbox.__file__).parent
FINDINGS = ("monitoring/attention.py", "monitoring/why.py", "monitoring/doctor.py", "checks/*.py", "pipeline/**/attention.py")
FILES = sorted(path for pattern in FINDINGS for path in ROOT.glob(pattern))

COMMAND = re.compile(r"\b(outbox_[a-z_]+)((?: [\w'-]+)*)")


def steps() -> list[tuple[str, str, str]]:
    """Return file, name and what follows it for all that looks like a command in the texts of findings."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if "SELECT" not in text and "\n" not in text:
                found += [(path.name, name, rest) for name, rest in COMMAND.findall(text)]
    return found


def test_names_commands_that_exist_with_options_that_they_take():
    tables = {model._meta.db_table for model in apps.get_models()} | {config.label for config in apps.get_app_configs()}
    named = [step for step in steps() if step[1] not in tables]

    wrong = []
    for file, name, rest in named:
        if name not in get_commands():
            wrong.append((file, name))
            continue
        parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
        wrong += [
            (file, name, option) for option in re.findall(r"--[a-z-]+", rest) if option not in parser._option_string_actions
        ]
    assert wrong == []
    assert len(named) > 20
