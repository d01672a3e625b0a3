"""A process that runs an audit by the stand-in, to be killed: see test_run.py."""

import sys
from datetime import timedelta

import django

django.setup()

from outbox.pipeline import runs  # noqa: E402
from outbox.pipeline.job_config import pipeline_config  # noqa: E402
from outbox.pipeline.spark import jobs  # noqa: E402


def log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


jobs.MODULE = "tests.outbox.pipeline.stand_in"
runs.run_and_store("default", pipeline_config(settle=timedelta(minutes=5)), asked_by="command", log=log)
