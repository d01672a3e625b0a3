"""The nightly audit, by Celery's worker and by Spark; what it finds stands in the tables."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest
from kombu import Connection

from outbox.embedded.models import EmbeddedMessage
from outbox.pipeline.models import AuditRun
from outbox.pipeline.spark.session import code_version
from outbox.pipeline.verdict import as_file, verify
from outbox.publishing import draft
from outbox.testing.clock import age_rows
from project.celery import app
from project.celery_files import Transport
from tests.database_url import environment_of
from tests.factories import message_id
from tests.outbox.pipeline.conftest import KEY
from tests.outbox.pipeline.stories import handle, relay
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.django_db(transaction=True)]

AGO = timedelta(minutes=10)  # what is younger than the settle time is under way

WORKER = [sys.executable, "-m", "celery", "--app", "project", "worker", "--queues", "outbox", "--concurrency", "1"]
ALONE = ["--without-gossip", "--without-mingle", "--without-heartbeat"]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    celery = {"CELERY_BROKER_URL": "files://localhost", "CELERY_FILES_DIR": str(tmp_path / "celery")}
    return environment_of("tests.journeys.short_tasks", **celery, OUTBOX_AUDIT_KEY=KEY)


@pytest.fixture
def worker(environment, tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen([*WORKER, *ALONE], env=environment, stdout=log, stderr=log)
    yield process
    process.terminate()
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()


class TestTheNightlyAudit:
    def test_stores_what_is_lost_and_what_was_judged(self, worker, environment, tmp_path, monkeypatch):
        pytest.importorskip("pyspark")
        monkeypatch.setenv("OUTBOX_AUDIT_KEY", KEY)
        begun_at, nth = datetime.now(UTC) - AGO, count()
        monkeypatch.setattr(draft, "uuid7", lambda: message_id(begun_at + timedelta(milliseconds=next(nth))))
        ids = relay(3)
        for group in ("cart", "points", "shipment"):
            handle(group)
        EmbeddedMessage.objects.filter(message_id=str(ids[1])).delete()
        age_rows("default", AGO)

        with Connection(transport=Transport, transport_options={"folder": environment["CELERY_FILES_DIR"]}) as celery:
            app.send_task("outbox.pipeline.tasks.audit", queue="outbox", connection=celery)

        has_ended = AuditRun.objects.exclude(state=AuditRun.RunState.RUNNING).exists
        wait_until(lambda: has_ended() or worker.poll() is not None, seconds=300)
        run = AuditRun.objects.get()
        assert (run.state, run.asked_by, run.exit_code) == (AuditRun.RunState.DONE, "beat", 1), (
            tmp_path / "worker.log"
        ).read_text()
        found = run.findings.values_list("kind", "stage", "first_number", "message_ids")
        assert list(found) == [("lost", "broker", 2, [str(ids[1])])]
        assert run.counts["orders"]["assigned"] == 3
        assert run.latencies.filter(hop="handle", consumer_group="points").exists()
        assert run.backlogs.get(consumer_group="cart", topic="orders").cause == "none"
        told = verify(as_file(run.verdict, run.signature))
        assert (told["data_digest"], told["code_version"]) == (run.data_digest, code_version())
        assert run.data_digest.startswith("sha256:")
