"""A wakeup over a real Redis: publish, and Celery's worker relays at once. No beat runs, so nothing else could."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis

from outbox.models import MessageState, Process
from project.servers.redis import Redis
from tests.database_url import environment_of
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.redis,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not Redis.is_here(), reason="There is no redis-server: apt-get install redis-server."),
]

PUBLISH = """
import time
from outbox import publish_raw, atomic
from outbox.publishing.wakeup import sender
with atomic():
    publish_raw("orders", {"number": 1})
while not sender.sent + sender.failed:
    time.sleep(0.01)
print(sender.sent)
"""


@pytest.fixture
def environment(tmp_path) -> Iterator[dict[str, str]]:
    """What a process of the shop needs: the test's database, and a Redis of its own."""
    with Redis(tmp_path) as server:
        yield environment_of("project.settings", CELERY_BROKER_URL=server.url)


@pytest.fixture
def worker(environment, tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "celery", "--app", "project", "worker", "--queues", "outbox", "--concurrency", "1"]
    log = tmp_path / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        with redis.Redis.from_url(environment["CELERY_BROKER_URL"]) as client:
            wait_until(lambda: client.exists("_kombu.binding.outbox") or process.poll() is not None, seconds=30)
        assert process.poll() is None, log.read_text()
        yield process
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
        process.wait()


class TestAWakeupOverRedis:
    def test_has_celerys_worker_relay_at_once(self, worker, environment):
        command = [sys.executable, "-m", "django", "shell", "--no-imports", "-c", PUBLISH]

        outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

        assert (outcome.stdout, outcome.returncode) == ("1\n", 0), outcome.stderr
        wait_until(lambda: MessageState.objects.filter(topic="orders", state="sent").exists())
        assert Process.objects.get(kind="relay").note == "celery"
