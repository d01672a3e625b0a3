import json
import re
from importlib import import_module

import pytest
from django.core.checks import ERROR as ERRORS
from django.core.checks import INFO
from django.core.management import call_command

from outbox.findings import Finding
from tests.commands import exit_code

command = import_module("outbox.management.commands.outbox_doctor")

OK = Finding("", "database 'default'", "answers", level=INFO)
WARNING = Finding("outbox.slow", "broker 'default'", "is slow", "Wait.")
ERROR = Finding("outbox.away", "broker 'default'", "is away", "Start it.", level=ERRORS)


@pytest.fixture
def examined(monkeypatch):
    """Run the command on such findings; return its exit code."""

    def examined(*findings, arguments=()):
        monkeypatch.setattr(command, "check", lambda: iter(findings))
        return exit_code("outbox_doctor", *arguments)

    return examined


class TestOutboxDoctor:
    @pytest.mark.parametrize(
        ("findings", "code"), [([], 0), ([OK], 0), ([WARNING, OK], 1), ([ERROR, WARNING], 2), ([OK, ERROR], 2)]
    )
    def test_ends_with_what_the_worst_finding_means(self, examined, findings, code):
        assert examined(*findings) == code

    def test_says_what_to_do(self, examined, capsys):
        examined(OK, WARNING, ERROR)

        assert capsys.readouterr().out.splitlines() == [
            "ok  database 'default': answers",
            "!   broker 'default': (outbox.slow) is slow",
            "    Wait.",
            "!!  broker 'default': (outbox.away) is away",
            "    Start it.",
        ]

    def test_says_since_when(self, examined, capsys):
        examined(Finding("outbox.slow", "broker 'default'", "is slow", "Wait.", seconds=60))

        assert re.match(r"!   broker 'default', since 20\d\d-[-\dT:+]+: \(outbox.slow\) is slow\n", capsys.readouterr().out)

    def test_prints_one_line_of_json(self, examined, capsys):
        examined(ERROR, arguments=["--json"])

        (line,) = capsys.readouterr().out.splitlines()
        [found] = json.loads(line)["findings"]
        assert (found.pop("subject"), found.pop("hint")) == (ERROR.obj, ERROR.hint)
        assert found == {"id": "outbox.away", "level": "error", "text": "is away", "since": None}

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_examines_the_shop(self, capsys, only_the_shops_types):
        with pytest.raises(SystemExit):
            call_command("outbox_doctor", "--json")

        found = json.loads(capsys.readouterr().out)["findings"]
        assert {"configuration", "database 'default'", "broker 'default'"} <= {one["subject"] for one in found}
        assert "outbox.no_relay" in {one["id"] for one in found}
