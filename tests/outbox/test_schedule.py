import subprocess
import sys
from datetime import timedelta

import pytest
from celery import current_app

import outbox.tasks  # noqa: F401  (registers the tasks)
from outbox.schedule import beat_schedule


class TestBeatSchedule:
    def test_names_tasks_that_exist(self):
        tasks = {entry["task"] for entry in beat_schedule().values()}

        assert tasks == {"outbox.tasks.sweep", "outbox.tasks.maintenance"}
        assert tasks <= set(current_app.tasks)

    def test_sweeps_each_second_and_keeps_up_hourly(self):
        every = {entry["task"]: entry["schedule"] for entry in beat_schedule().values()}

        assert every == {"outbox.tasks.sweep": timedelta(seconds=1), "outbox.tasks.maintenance": timedelta(hours=1)}

    def test_has_celery_serve_the_groups_it_is_given(self):
        schedule = beat_schedule(consume=["cart", "points"])

        served = {tuple(entry["args"]) for entry in schedule.values() if entry["task"] == "outbox.tasks.consume"}
        assert served == {("cart",), ("points",)}
        assert "outbox.tasks.consume" in current_app.tasks

    def test_refuses_a_text_whose_letters_would_be_groups(self):
        with pytest.raises(TypeError, match=r"beat_schedule\(consume=\['points'\]\)"):
            beat_schedule(consume="points")

    def test_lets_ticks_expire_that_nobody_took(self):
        slow = beat_schedule(sweep=timedelta(minutes=1), queue="mine")["outbox-sweep"]

        assert beat_schedule()["outbox-sweep"]["options"]["expires"] == 10
        assert slow["options"] == {"expires": 60, "queue": "mine", "ignore_result": True}

    def test_can_be_imported_by_settings(self):
        code = "import sys; import outbox.schedule; assert 'django' not in sys.modules; assert 'celery' not in sys.modules"

        subprocess.run([sys.executable, "-c", code], check=True)
