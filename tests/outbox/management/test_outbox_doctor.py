import json
from importlib import import_module

import pytest
from django.core.management import call_command

from outbox.monitoring.doctor import DoctorFinding, Level

command = import_module("outbox.management.commands.outbox_doctor")

OK = DoctorFinding(Level.OK, "database 'default'", "answers")
WARNING = DoctorFinding(Level.WARNING, "broker 'default'", "is slow", "Wait.")
ERROR = DoctorFinding(Level.ERROR, "broker 'default'", "is away", "Start it.")


@pytest.fixture
def examined(monkeypatch):
    """Run the command on such findings; return its exit code."""

    def examined(*findings, arguments=()):
        monkeypatch.setattr(command, "check", lambda: iter(findings))
        try:
            call_command("outbox_doctor", *arguments)
        except SystemExit as end:
            return end.code
        return 0

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
            "!   broker 'default': is slow",
            "    Wait.",
            "!!  broker 'default': is away",
            "    Start it.",
        ]

    def test_prints_one_line_of_json(self, examined, capsys):
        examined(ERROR, arguments=["--json"])

        (line,) = capsys.readouterr().out.splitlines()
        assert json.loads(line) == {
            "findings": [{"level": "error", "subject": "broker 'default'", "text": "is away", "hint": "Start it."}]
        }

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_examines_the_shop(self, capsys, only_the_shops_types):
        with pytest.raises(SystemExit):
            call_command("outbox_doctor", "--json")

        found = json.loads(capsys.readouterr().out)["findings"]
        assert {"configuration", "database 'default'", "broker 'default'"} <= {one["subject"] for one in found}
        assert {one["level"] for one in found if one["subject"].startswith("relay of")} == {"warning"}
