import subprocess
import sys
from datetime import timedelta

from celery import current_app
from celery.schedules import crontab

import outbox.pipeline.tasks  # noqa: F401  (registers the tasks)
from outbox.pipeline.schedule import pipeline_schedule
from outbox.schedule import beat_schedule

NIGHTLY = crontab(hour=3, minute=0)


class TestPipelineSchedule:
    def test_does_nothing_that_it_is_not_told_to(self):
        assert pipeline_schedule() == {}

    def test_stands_beside_the_schedule_of_the_outbox(self):
        schedule = beat_schedule() | pipeline_schedule(audit=NIGHTLY)

        assert set(schedule) == {"outbox-sweep", "outbox-maintenance", "outbox-audit"}

    def test_audits_when_it_is_told_to(self):
        entry = pipeline_schedule(audit=NIGHTLY, audit_at_most=timedelta(minutes=20), queue="heavy")["outbox-audit"]

        assert (entry["task"], entry["schedule"], entry["args"]) == ("outbox.pipeline.tasks.audit", NIGHTLY, (1200.0,))
        assert entry["options"] == {"expires": 3600, "queue": "heavy", "ignore_result": True}
        assert pipeline_schedule(audit=NIGHTLY)["outbox-audit"]["options"]["queue"] == "outbox"
        assert "outbox.pipeline.tasks.audit" in current_app.tasks

    def test_audits_what_was_archived_when_it_is_told_to(self):
        entry = pipeline_schedule(audit=timedelta(days=1), audit_archived=True)["outbox-audit"]

        assert entry["args"] == (3600.0, True)

    def test_archives_when_it_is_told_to(self):
        entry = pipeline_schedule(archive=NIGHTLY, queue="heavy")["outbox-archive"]

        assert (entry["task"], entry["schedule"], entry["options"]["queue"]) == (
            "outbox.pipeline.tasks.archive",
            NIGHTLY,
            "heavy",
        )
        assert "outbox.pipeline.tasks.archive" in current_app.tasks

    def test_can_be_imported_by_settings(self):
        code = "import sys; import outbox.pipeline.schedule as s; s.pipeline_schedule(); assert 'django' not in sys.modules"

        subprocess.run([sys.executable, "-c", code], check=True)
