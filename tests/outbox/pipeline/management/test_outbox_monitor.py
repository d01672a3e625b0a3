import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from outbox.pipeline.management.commands import outbox_monitor
from outbox.pipeline.models import MonitorLane

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lanes")]


class TestWhereTheJobCannotBegin:
    def test_ends_with_2(self, no_java, tmp_path):
        with pytest.raises(CommandError) as caught:
            call_command("outbox_monitor", "--once", "--checkpoint", str(tmp_path))

        assert caught.value.returncode == 2


class TestAfterTheJob:
    @pytest.fixture(autouse=True)
    def _after_the_job(self, monkeypatch):
        """Leave the job out: what it does is proved in tests/outbox/pipeline/spark/monitor."""
        monkeypatch.setattr(outbox_monitor, "run_monitor", lambda *_, **__: None)

    def run(self, *arguments):
        output = StringIO()
        with pytest.raises(SystemExit) as caught:
            call_command("outbox_monitor", "--once", "--checkpoint", "nowhere", *arguments, stdout=output)
        assert caught.value.code == 1
        return output.getvalue()

    def test_names_what_is_late(self):
        said = self.run()

        assert "! 2 missing to late in topic 'orders', lane 1: the first is number 7, since " in said
        assert said.count("!") == 1

    def test_says_it_as_json(self):
        said = json.loads(self.run("--json"))

        assert [one["group"] for one in said["lanes"]] == ["", "late", "under-way"]
        assert [(one["group"], one["first_missing"]) for one in said["late"]] == [("late", 7)]

    def test_ends_well_where_nothing_is_late(self):
        MonitorLane.objects.filter(consumer_group="late").delete()
        output = StringIO()

        call_command("outbox_monitor", "--once", "--checkpoint", "nowhere", stdout=output)

        assert "Nothing is missing that is not under way." in output.getvalue()
