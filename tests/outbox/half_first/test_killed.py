"""A real process, killed with SIGKILL at each step. Check-back and sweep end what it left, whichever comes first."""

import signal

import pytest
from django.contrib.auth.models import Group

from outbox.embedded import EmbeddedBroker
from outbox.embedded.models import EmbeddedHalf
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half
from outbox.models import Batch, CheckBack, MessageState, State
from tests.outbox.half_first.orders import ask, half_first_token, is_hidden, shown
from tests.outbox.half_first.programs import PLACES, start
from tests.waiting import wait_until

OUTBOX = {
    "BROKERS": {"default": {"OPTIONS": {"CHECK_AFTER": "PT0.001S"}}},
    "TOPICS": {"orders": {"TYPE": "transaction"}},
    "CELERY_WAKEUP": False,
}


def settle(broker: EmbeddedBroker) -> None:
    """Ask until nothing is left to ask about."""
    wait_until(lambda: broker.check_halves(ask) == 0 and not is_hidden())


@pytest.mark.parametrize(("place", "is_committed"), PLACES.items())
class TestAProcessKilled:
    @pytest.fixture(autouse=True)
    def _killed(self, place):
        assert start(OUTBOX, f"{place}=kill").wait(30) == -signal.SIGKILL

    def test_ends_rightly_by_the_check_back(self, broker, relay, place, is_committed):
        has_asked = place not in ("half_first.after_prepare", "half_first.after_end")

        settle(broker)

        assert len(shown(broker)) == Group.objects.count() == is_committed
        expected = [COMMIT if is_committed else ROLLBACK] if has_asked else []
        assert [one for one in CheckBack.objects.values_list("answer", flat=True) if one != UNKNOWN] == expected
        relay.sweep()
        assert [batch.state for batch in Batch.objects.all()] == [State.SENT] * is_committed

    def test_ends_rightly_by_the_sweep(self, broker, relay, place, is_committed):
        relay.sweep()
        settle(broker)

        assert len(shown(broker)) == Group.objects.count() == is_committed
        assert [one.state for one in MessageState.objects.all()] == ["sent"] * is_committed
        assert [batch.attempt for batch in Batch.objects.all()] == [1] * is_committed


class TestAProcessThatHangs:
    def test_is_waited_for_until_it_is_killed(self, broker):
        process = start(OUTBOX, "half_first.after_work=hang")
        stored = wait_until(lambda: EmbeddedHalf.objects.first() or process.poll(), 30)
        half = Half("orders", stored.message_id, str(stored.id), half_first_token())

        while_it_hangs = [ask(half), ask(half)]
        process.kill()
        process.wait(10)

        assert while_it_hangs == [UNKNOWN, UNKNOWN]
        assert wait_until(lambda: ask(half) is not UNKNOWN and ask(half)) is ROLLBACK
        assert Group.objects.count() == 0
