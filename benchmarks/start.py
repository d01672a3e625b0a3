"""
The start of a web process: CPU of imports and of `django.setup()`, beside a project with Celery, REST framework and the admin.

Bytecode is there, as after an installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figure import Figure, interleaved

ROUNDS = 15
DJANGO = ["admin", "auth", "contenttypes", "messages", "sessions"]
APPS = [*(f"django.contrib.{app}" for app in DJANGO), "rest_framework"]
WITH_OUTBOX = [*APPS, "outbox", "outbox.embedded"]
CODE = """
import resource

from django.conf import settings

settings.configure(
    SECRET_KEY="bench", INSTALLED_APPS={apps}, DATABASES={{"default": {{"ENGINE": "django.db.backends.postgresql"}}}},
    OUTBOX={{"BROKERS": {{"default": {{"BACKEND": "outbox.embedded.EmbeddedBroker"}}}}, "TOPICS": {{"orders": {{}}}}}},
)
import celery, django, rest_framework.views

django.setup()
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def measure(scale: float) -> list[Figure]:
    """Compare the two; both have run once before."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as bytecode:

        def seconds(apps: list[str]) -> float:
            environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
            command = [sys.executable, "-c", CODE.format(apps=apps)]
            return float(subprocess.check_output(command, env=environment, cwd=Path(__file__).parents[1], text=True))

        seconds(WITH_OUTBOX)
        bare, ours = interleaved(max(3, int(ROUNDS * scale)), lambda: seconds(APPS), lambda: seconds(WITH_OUTBOX))
    note = f"{ours:.2f} s beside {bare:.2f} s"
    return [Figure("start of a web process: CPU over a bare one", ours - bare, "s", 0.15, at_most=True, note=note)]
