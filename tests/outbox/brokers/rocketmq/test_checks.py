"""What RocketMQ asks about half messages, and what becomes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from outbox.brokers.base import Broker, Delivery, Ended, Verdict
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Resolution, TopicType
from project.servers.rocketmq import RocketMQ
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.waiting import wait_until

HALF = TopicType.TRANSACTION
LONG = timedelta(seconds=8)  # a check, its answer and a second one fit in


@dataclass
class Asked:
    """Answers in turn, the last answer again and again, and keeps the questions."""

    answers: list[Resolution | Exception]
    halves: list[Half] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, half: Half) -> Resolution:
        with self.lock:
            self.halves.append(half)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def arrive(acts: Acts, count: int = 1, seconds: float = 60) -> list[Delivery]:
    """Receive till so many messages are there, and then for a while, since copies would come late."""
    found: list[Delivery] = []
    wait_until(lambda: found.extend(acts.receive(HALF)) or len(ids(found)) >= count, seconds)
    return [*found, *acts.receive(HALF, wait=timedelta(seconds=3))]


def ids(deliveries: list[Delivery]) -> set[str]:
    """Give what arrived, copies left out: asked each second, a busy server asks twice before it notes an answer."""
    return {delivery.message_id for delivery in deliveries}


@pytest.mark.usefixtures("fast_checks")
class TestListen:
    def test_shows_the_half_as_it_was_sent_and_commits_it(self, acts: Acts, broker: Broker):
        message = acts.message(HALF, body=b"order", key="4711 a", headers={"ce-about": "shop.order:1", "who": "\x00"})
        [half] = acts.send_halves(message)
        asked = Asked([COMMIT])

        broker.listen(asked)

        assert ids(arrive(acts)) == {message.message_id}
        question = asked.halves[0]
        assert (question.half_id, question.message_id, question.topic) == (half.half_id, message.message_id, half.topic)
        assert (question.token, question.key, question.body) == (message.token, "4711 a", b"order")
        assert question.headers == message.headers
        assert question.asked >= 1
        assert question.born_at is not None

    def test_rolls_back_what_is_answered_so_and_asks_no_more(self, acts: Acts, broker: Broker):
        acts.half()
        asked = Asked([ROLLBACK])

        broker.listen(asked)

        wait_until(lambda: asked.halves, 30)
        assert acts.receive(HALF, wait=LONG) == []
        assert len(asked.halves) == 1

    @pytest.mark.parametrize("first", [UNKNOWN, ConnectionError("no database")], ids=["unknown", "error"])
    def test_is_asked_again_when_nothing_is_known(self, acts: Acts, broker: Broker, first: Resolution | Exception):
        acts.half()
        asked = Asked([first, COMMIT])

        broker.listen(asked)

        assert len(ids(arrive(acts))) == 1
        assert [half.asked for half in asked.halves][:2] == [1, 2]

    def test_settles_some_that_nobody_ended(self, acts: Acts, broker: Broker):
        halves = acts.send_halves(*[acts.message(HALF, body=b"%d" % n) for n in range(6)])
        acts.end(halves[0], halves[1])

        broker.listen(lambda half: COMMIT if half.body in (b"2", b"3") else ROLLBACK)

        assert ids(arrive(acts, 4)) == {half.message_id for half in halves[:4]}

    def test_shares_the_questions_between_two(self, acts: Acts, harness: RocketMQHarness):
        listeners = [(harness.open(), Asked([COMMIT])) for _ in range(2)]
        for listener, asked in listeners:
            listener.listen(asked)

        acts.send_halves(*[acts.message(HALF) for _ in range(20)])

        assert len(ids(arrive(acts, 20))) == 20
        assert all(asked.halves for _, asked in listeners)

    def test_hears_the_questions_of_a_server_that_was_killed(self, acts: Acts, broker: Broker, server: RocketMQ):
        asked = Asked([COMMIT])
        broker.listen(asked)
        half = acts.half()
        server.kill_broker()
        [away] = broker.end([half], COMMIT)

        server.start_broker()

        assert away.verdict is Verdict.UNAVAILABLE
        assert ids(arrive(acts)) == {half.message_id}

    def test_leaves_what_was_asked_about_too_often_to_rule_r(
        self, acts: Acts, broker: Broker, server: RocketMQ, restore_checks: None
    ):
        server.set("transactionCheckMax", 2)
        half = acts.half()
        asked = Asked([UNKNOWN])

        broker.listen(asked)

        wait_until(lambda: len(asked.halves) == 2, 30)
        assert acts.receive(HALF, wait=LONG) == []
        assert len(asked.halves) == 2
        assert {found.state for found in broker.find(half.message_id)} == {"half"}

    def test_waits_for_somebody_to_listen(self, acts: Acts, harness: RocketMQHarness):
        acts.half()
        assert acts.receive(HALF, wait=LONG) == []

        harness.open().listen(lambda half: COMMIT)

        assert len(ids(arrive(acts))) == 1


class TestEnd:
    def test_makes_one_copy_of_a_half_that_is_committed_twice(self, acts: Acts):
        half = acts.half()

        assert acts.end(half) == [Ended.COMMITTED]
        assert acts.end(half) == [Ended.NOT_FOUND]

        assert len(arrive(acts)) == 1

    def test_commits_nothing_that_might_meet_a_check(
        self, acts: Acts, harness: RocketMQHarness, fast_checks: None, past: Callable[[float], None]
    ):
        slow = harness.open(COMMIT_WINDOW=timedelta(milliseconds=300))
        mine = Acts(harness, slow)
        half = mine.half()
        past(0.4)

        [outcome] = slow.end([half], COMMIT)

        assert outcome.verdict is Verdict.UNSURE
        assert acts.receive(HALF) == []
        slow.listen(lambda half: COMMIT)
        assert len(ids(arrive(acts))) == 1

    def test_sends_no_half_that_could_not_be_committed_in_time(self, harness: RocketMQHarness):
        slow = harness.open(COMMIT_WINDOW=timedelta(milliseconds=100), IN_FLIGHT=1)
        mine = Acts(harness, slow)

        verdicts = [outcome.verdict for outcome in slow.send_halves([mine.message(HALF) for _ in range(300)])]

        assert verdicts[0] is Verdict.ACCEPTED
        assert verdicts[-1] is Verdict.UNAVAILABLE
        assert verdicts == sorted(verdicts)  # cut once
