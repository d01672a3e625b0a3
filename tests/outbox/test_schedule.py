import subprocess
import sys
from datetime import timedelta
from inspect import signature

from celery import current_app
from celery.schedules import crontab

import outbox.tasks  # noqa: F401  (registers the tasks)
from outbox.schedule import beat_schedule


class TestBeatSchedule:
    def test_names_tasks_that_exist(self):
        tasks = {entry["task"] for entry in beat_schedule().values()}

        assert tasks == {"outbox.tasks.sweep", "outbox.tasks.upkeep"}
        assert tasks <= set(current_app.tasks)

    def test_sweeps_each_second_and_keeps_up_hourly(self):
        every = {entry["task"]: entry["schedule"] for entry in beat_schedule().values()}

        assert every == {"outbox.tasks.sweep": timedelta(seconds=1), "outbox.tasks.upkeep": timedelta(hours=1)}

    def test_has_celery_serve_the_groups_it_is_given(self):
        schedule = beat_schedule(consume=["cart", "points"])

        served = {tuple(entry["args"]) for entry in schedule.values() if entry["task"] == "outbox.tasks.consume"}
        assert served == {("cart",), ("points",)}
        assert "outbox.tasks.consume" in current_app.tasks

    def test_audits_when_it_is_told_to(self):
        nightly = crontab(hour=3, minute=0)

        entry = beat_schedule(audit=nightly, audit_at_most=timedelta(minutes=20), audit_queue="heavy")["outbox-audit"]

        assert (entry["task"], entry["schedule"], entry["args"]) == ("outbox.tasks.audit", nightly, (1200.0,))
        assert entry["options"] == {"expires": 3600, "queue": "heavy", "ignore_result": True}
        assert beat_schedule(audit=nightly)["outbox-audit"]["options"]["queue"] == "outbox"
        assert "outbox.tasks.audit" in current_app.tasks

    def test_audits_what_was_archived_when_it_is_told_to(self):
        entry = beat_schedule(audit=timedelta(days=1), audit_archived=True)["outbox-audit"]

        assert entry["args"] == (3600.0, True)

    def test_archives_when_it_is_told_to(self):
        nightly = crontab(hour=2, minute=0)

        entry = beat_schedule(archive=nightly, audit_queue="heavy")["outbox-archive"]

        assert (entry["task"], entry["schedule"], entry["options"]["queue"]) == ("outbox.tasks.archive", nightly, "heavy")
        assert "outbox.tasks.archive" in current_app.tasks

    def test_monitors_the_databases_that_it_is_given(self):
        folders = {"default": "/var/lib/shop/monitor", "archive": "/var/lib/shop/other"}

        schedule = beat_schedule(monitor=folders, monitor_every=timedelta(minutes=2), audit_queue="heavy")

        entry = schedule["outbox-monitor-archive"]
        assert (entry["task"], entry["schedule"]) == ("outbox.tasks.monitor", timedelta(minutes=2))
        assert entry["options"] == {"expires": 120, "queue": "heavy", "ignore_result": True}
        signature(current_app.tasks[entry["task"]].run).bind(*entry["args"])
        assert entry["args"] == ("/var/lib/shop/other", "archive")
        assert schedule["outbox-monitor-default"]["args"] == ("/var/lib/shop/monitor", "default")
        assert beat_schedule(monitor=folders)["outbox-monitor-default"]["options"]["queue"] == "outbox"

    def test_lets_ticks_expire_that_nobody_took(self):
        slow = beat_schedule(sweep=timedelta(minutes=1), queue="mine")["outbox-sweep"]

        assert beat_schedule()["outbox-sweep"]["options"]["expires"] == 10
        assert slow["options"] == {"expires": 60, "queue": "mine", "ignore_result": True}

    def test_can_be_imported_by_settings(self):
        code = "import sys; import outbox.schedule; assert 'django' not in sys.modules; assert 'celery' not in sys.modules"

        subprocess.run([sys.executable, "-c", code], check=True)
