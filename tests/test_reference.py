"""The reference says what the code says."""

import inspect
import re

import pytest
from django.db import connection
from django.dispatch import Signal
from django.utils.module_loading import import_string

import outbox
from docs.blocks import checks, commands, reasons, settings, tables
from docs.blocks.source import ROOT, attributes
from outbox import signals
from outbox.findings import RULES, Needs

TABLES = r"""
SELECT relname FROM pg_class
WHERE relname LIKE 'outbox\_%' AND relkind IN ('r', 'p', 'v') AND NOT relispartition
    AND relnamespace = current_schema()::regnamespace
"""

COLUMNS = """
SELECT column_name FROM information_schema.columns WHERE table_name = %s AND table_schema = current_schema()
"""

API = (ROOT / "docs/reference/api.md").read_text()
DOCUMENTED = re.findall(r"^\.\. auto\w+:: (\S+)$", API, re.MULTILINE)


class TestTheApi:
    def test_tells_of_every_public_name(self):
        names = {f"outbox.{name}" for name in outbox.__all__} - {"outbox.Reject", "outbox.RetryLater"}  # on the page of errors
        names |= {f"outbox.signals.{name}" for name in vars(signals) if isinstance(getattr(signals, name), Signal)}

        assert names - set(DOCUMENTED) == set()

    @pytest.mark.parametrize("path", DOCUMENTED)
    def test_says_what_each_name_does(self, path):
        assert inspect.getdoc(import_string(path))


class TestTheSettings:
    @pytest.mark.parametrize("section", [*settings.SECTIONS, *settings.PIPELINE], ids=lambda section: section[2])
    def test_each_say_what_they_mean(self, section):
        _, path, name = section

        assert [one.name for one in attributes(path, name) if not one.comment] == []


class TestTheChecks:
    def test_have_each_an_entry(self):
        written = {
            number
            for pattern in ("findings.py", "checks/*.py", "pipeline/checks.py")
            for path in (ROOT / "outbox").glob(pattern)
            for number in re.findall(r'"outbox\.([EW]\d{3}|database_unfit)"', path.read_text())
        }

        assert {number for number, *_ in checks.entries(checks.CORE, checks.PIPELINE)} == written

    def test_have_an_entry_for_each_id_of_a_rule(self):
        own = {number for one in RULES if one.ids[0].startswith("outbox") for number in one.ids}

        assert own - {number for number, *_ in checks.entries_of(*Needs)} == set()

    def test_have_a_number_of_their_own(self):
        numbers = [f"outbox.{number}" for number, *_ in checks.entries(checks.CORE, checks.PIPELINE)]
        numbers += [number for number, *_ in checks.entries_of(*Needs)]

        assert len(numbers) == len(set(numbers))

    def test_have_each_a_test(self):
        tested = {
            number
            for path in (ROOT / "tests").rglob("test_*.py")
            for number in re.findall(r"\boutbox\.([EW]\d{3}|database_unfit)\b", path.read_text())
        }

        assert {number for number, *_ in checks.entries(checks.CORE, checks.PIPELINE)} - tested == set()


class TestTheReasons:
    """Each setting, command, check and table says in one line why it is there; what is gone has no line left."""

    def test_are_those_of_the_settings(self):
        sections = [*settings.SECTIONS, *settings.PIPELINE, *(option[:3] for option in settings.OPTIONS)]
        there = {name: [one.name for one in attributes(path, name)] for _, path, name in sections}

        assert {name: [*lines] for name, lines in reasons.SETTINGS.items()} == there

    def test_are_those_of_the_commands(self):
        assert set(reasons.COMMANDS) == set(commands.names())

    def test_are_those_of_the_checks(self):
        assert set(reasons.CHECKS) == {number for number, *_ in checks.entries(checks.CORE, checks.PIPELINE)}

    def test_are_those_of_the_tables(self):
        assert set(reasons.TABLES) == {model._meta.db_table for model in tables.all_models()}

    def test_are_one_sentence_each(self):
        lines = [line for section in reasons.SETTINGS.values() for line in section.values()]
        lines += [*reasons.COMMANDS.values(), *reasons.CHECKS.values(), *reasons.TABLES.values()]

        assert [line for line in lines if not line.endswith(".") or "\n" in line] == []


def section(command):
    """What the page says of a command."""
    return commands.page().partition(f"## `{command}`")[2].partition("\n## ")[0]


class TestTheCommands:
    @pytest.mark.parametrize("name", commands.names())
    def test_say_what_their_exit_codes_mean(self, name):
        assert re.search(r"^Exit code: 0 .+, 1 .+, 2 .+\.$", section(name), re.MULTILINE)

    @pytest.mark.parametrize("name", commands.names())
    def test_say_what_their_arguments_mean(self, name):
        assert not re.search(r"\|\s+\|$", section(name), re.MULTILINE)


@pytest.mark.django_db
class TestTheTables:
    def test_are_all_there_are(self):
        with connection.cursor() as cursor:
            cursor.execute(TABLES)
            found = {name for (name,) in cursor.fetchall()}

        described = {model._meta.db_table for model in tables.all_models()}
        assert found == described | {name for names in tables.WITHOUT_MODEL.values() for name in names}

    @pytest.mark.parametrize("model", tables.all_models(), ids=lambda model: model._meta.db_table)
    def test_have_the_columns_that_are_described(self, model):
        with connection.cursor() as cursor:
            cursor.execute(COLUMNS, [model._meta.db_table])
            found = {name for (name,) in cursor.fetchall()}

        assert found == {field.column for field in model._meta.concrete_fields if field.column}
