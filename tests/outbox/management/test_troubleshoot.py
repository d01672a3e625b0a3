"""docs/how-to/troubleshoot.md: its commands run, its quotes are from the code, and there are its findings."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
from django.core.management import call_command

import outbox
from outbox.findings import Needs, rules
from tests.quotes import ROOT

TEXT = (ROOT / "docs/how-to/troubleshoot.md").read_text()
# Commands that need neither a server nor an answer.
COMMANDS = sorted(
    set(re.findall(r"^\$ python manage\.py (outbox_(?:status|catalogue|maintenance|replay).*)$", TEXT, re.MULTILINE))
)
SAYINGS = re.findall(r"`([A-Z][a-z]+ [^`=]+|(?:was|has|does|is|its|it|ignored) [^`]+)`", TEXT)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestTheCommands:
    @pytest.mark.parametrize("line", COMMANDS)
    def test_run(self, line: str, capsys: pytest.CaptureFixture[str]):
        with suppress(SystemExit):
            call_command(*shlex.split(line))

        assert capsys.readouterr().out


class TestTheTable:
    def test_quotes_what_the_status_of_a_message_says(self):
        said = (Path(outbox.__file__).parent / "monitoring/why.py").read_text()

        assert len(SAYINGS) > 5
        assert [text for text in SAYINGS if text not in said] == []

    def test_names_findings_that_there_are(self):
        named = set(re.findall(r"`(outbox\.[a-z_]+)`", TEXT)) - {"outbox.embedded"}

        assert named
        assert named <= {number for rule in rules(*Needs) for number in rule.ids}
