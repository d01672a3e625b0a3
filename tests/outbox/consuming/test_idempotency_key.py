"""RedisIdempotencyKey on a real Redis."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import redis

from outbox import RedisIdempotencyKey, RetryLater, consumer
from outbox.consuming.handle import handle
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import group
from project.servers.redis import Redis
from tests.outbox.consuming.deliveries import delivery, end_delays, run_due
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(not Redis.is_here(), reason="There is no redis-server: apt-get install redis-server."),
]

SOON = timedelta(milliseconds=100)

# Send a mail once: a line in a file, which belongs to no transaction. Arguments: Redis, the file, where to die.
HANDLER = """
import os, signal, sys
from datetime import timedelta
import redis
from outbox import RedisIdempotencyKey, RetryLater

url, mails, place = sys.argv[1:]

def reach(here):
    if here == place:
        os.kill(os.getpid(), signal.SIGKILL)

once = RedisIdempotencyKey(redis.Redis.from_url(url), held=timedelta(minutes=1))
try:
    with once("mail:1") as is_first:
        reach("before the effect")
        if is_first:
            with open(mails, "a") as file:
                file.write("mail\\n")
        reach("after the effect")
except RetryLater:
    sys.exit(11)
sys.exit(0 if is_first else 10)
"""
FIRST, AGAIN, LATER = 0, 10, 11


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
def client(server: Redis, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, decode_responses=request.param) as client:
        client.flushall()
        yield client


class TestRedisIdempotencyKey:
    def test_lets_the_first_one_act_and_no_other(self, client):
        once = RedisIdempotencyKey(client)
        acted = []

        for _ in range(3):
            with once("cart:1") as is_first:
                acted.append(is_first)

        assert acted == [True, False, False]

    def test_tells_keys_apart(self, client):
        with RedisIdempotencyKey(client)("cart:1") as first, RedisIdempotencyKey(client)("cart:2") as second:
            assert (first, second) == (True, True)

    def test_sends_away_who_comes_while_another_acts(self, client):
        held, asked = RedisIdempotencyKey(client, held=timedelta(seconds=30)), RedisIdempotencyKey(client)

        with held("cart:1"), pytest.raises(RetryLater, match="held by another") as told, asked("cart:1"):
            pass

        assert timedelta(seconds=25) < told.value.after <= timedelta(seconds=30)

    def test_is_given_up_when_the_effect_fails(self, client):
        once = RedisIdempotencyKey(client)
        with pytest.raises(ConnectionError), once("cart:1"):
            raise ConnectionError("no mail today")

        with once("cart:1") as is_first:
            assert is_first

    def test_is_taken_over_when_its_holder_has_died(self, client):
        once = RedisIdempotencyKey(client, held=SOON)
        holder = once("cart:1")
        holder.__enter__()
        wait_until(lambda: not client.exists("outbox:token:cart:1"))

        with once("cart:1") as is_first:
            assert is_first

    @pytest.mark.parametrize("error", [None, ConnectionError("no mail today")], ids=["done", "failed"])
    def test_stays_with_who_took_it_over(self, client, error):
        late = RedisIdempotencyKey(client, held=SOON)("cart:1")
        late.__enter__()
        wait_until(lambda: not client.exists("outbox:token:cart:1"))

        with RedisIdempotencyKey(client)("cart:1"):
            held = client.get("outbox:token:cart:1")
            late.__exit__(error and type(error), error, None)
            assert client.get("outbox:token:cart:1") == held

    def test_notes_an_effect_that_took_longer_than_the_token_was_held(self, client):
        with RedisIdempotencyKey(client, held=SOON)("cart:1"):
            wait_until(lambda: not client.exists("outbox:token:cart:1"))

        assert client.get("outbox:token:cart:1") in (b"done", "done")

    def test_is_forgotten_after_its_time(self, client):
        with RedisIdempotencyKey(client, kept=timedelta(hours=1))("cart:1"):
            pass

        assert 3_500_000 < client.pttl("outbox:token:cart:1") <= 3_600_000

    def test_knows_its_own_where_the_client_asked_twice(self, client, monkeypatch):
        taken = client.set

        def lose_the_answer(*arguments, **options):
            taken(*arguments, **options)
            return taken(*arguments, **options)

        monkeypatch.setattr(client, "set", lose_the_answer)

        with RedisIdempotencyKey(client)("cart:1") as is_first:
            assert is_first

    @pytest.mark.django_db(transaction=True)
    def test_keeps_a_redelivered_message_from_acting_again(self, client):
        once = RedisIdempotencyKey(client)
        mails = []

        @consumer(Placed, group="cart")
        def confirm(message, context):
            with once(context.idempotency_key) as is_first:
                if is_first:
                    mails.append(message.invoice)
            if len(mails) == 1 and context.delivery_count == 1:
                raise OSError("the database transaction is rolled back, the mail is not")

        first = handle(group("cart"), delivery(Placed("A1"))).outcome
        end_delays()

        assert (first, run_due()) == (Outcome.DEFERRED, [Outcome.HANDLED])
        assert mails == ["A1"]

    @pytest.mark.django_db(transaction=True)
    def test_has_the_message_retried_while_redis_is_away(self, client):
        @consumer(Placed, group="cart")
        def confirm(message, context):
            with RedisIdempotencyKey(redis.Redis(port=1, retry=None))(context.idempotency_key):
                raise AssertionError("nobody may act")

        assert handle(group("cart"), delivery(Placed("A1"))).outcome is Outcome.DEFERRED


def end_time_of(token, client):
    """End the time for which a killed process holds a token."""
    assert 0 < client.pttl(token) <= 60_000
    client.pexpire(token, 1)
    wait_until(lambda: not client.exists(token))


@pytest.mark.parametrize("client", [True], indirect=True, ids=["text"])
class TestAProcessThatIsKilled:
    @pytest.fixture
    def mails(self, tmp_path):
        path = tmp_path / "mails"
        path.touch()
        return path

    @pytest.fixture
    def handle_elsewhere(self, server, client, mails):
        """Handle a message in a process of its own, which is killed at a place; return its exit code."""

        def handle_elsewhere(place=""):
            program = [sys.executable, "-c", HANDLER, server.url, str(mails), place]
            return subprocess.run(program, timeout=60, check=False).returncode

        return handle_elsewhere

    def test_before_the_effect_has_another_process_do_it_later(self, handle_elsewhere, client, mails):
        assert handle_elsewhere("before the effect") == -signal.SIGKILL
        assert handle_elsewhere() == LATER
        end_time_of("outbox:token:mail:1", client)

        assert [handle_elsewhere(), handle_elsewhere()] == [FIRST, AGAIN]
        assert mails.read_text() == "mail\n"

    def test_after_the_effect_has_it_happen_twice(self, handle_elsewhere, client, mails):
        """What the page says: weaker than the inbox."""
        assert handle_elsewhere("after the effect") == -signal.SIGKILL
        end_time_of("outbox:token:mail:1", client)

        assert [handle_elsewhere(), handle_elsewhere()] == [FIRST, AGAIN]
        assert mails.read_text() == "mail\nmail\n"

    def test_finds_its_key_after_redis_itself_was_killed(self, handle_elsewhere, server, client, mails):
        assert handle_elsewhere() == FIRST
        server.kill()
        server.start()

        assert handle_elsewhere() == AGAIN
        assert mails.read_text() == "mail\n"
