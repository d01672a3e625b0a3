"""
How half messages end on a real server: the cases of RocketMQ's own end-to-end suite, and some that it does not know.

All halves take their ways side by side, since each way is waiting; the tests look at where they led. What arrived is
counted in the server's log by key, where a copy is seen that no consumer was handed.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from outbox.brokers.base import Ended, HalfRef, SendResult
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Resolution, TopicType
from project.servers.rocketmq import FAST_CHECKS, RocketMQ
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.outbox.brokers.rocketmq.log import copies, noted_ends, producers, rounds
from tests.rocketmq_node import server as the_server
from tests.waiting import wait_until

HALF = TopicType.TRANSACTION

# What is done at once, each by another process than the one that sent it.
SAID = {
    "commit": [COMMIT],
    "rollback": [ROLLBACK],
    "commit twice": [COMMIT, COMMIT],
    "commit, then rollback": [COMMIT, ROLLBACK],
    "rollback, then commit": [ROLLBACK, COMMIT],
    "of five: 1": [COMMIT],
    "of five: 2": [ROLLBACK],
}

# What is said to the server's questions, in turn; the last answer again and again.
ANSWERED: dict[str, list[Resolution | Exception]] = {
    "commit in check": [COMMIT],
    "rollback in check": [ROLLBACK],
    "unknown, then commit": [UNKNOWN, COMMIT],
    "error, then commit": [ConnectionError("no database"), COMMIT],
    "unknown, then rollback": [UNKNOWN, ROLLBACK],
    "of five: 3": [COMMIT],
    "of five: 4": [ROLLBACK],
    "of five: 5": [UNKNOWN, COMMIT],
    **{f"shared: {number}": [COMMIT] for number in range(20)},
}

# Sent by relays whose clocks are so many seconds off; one half of each is committed at once, one is left to the check.
OFF = {"ahead": 10, "behind": -10}
COMMITTED, LEFT = "{}: committed", "{}: left to the check"

LATE = "commit while a check is outstanding"

# Sent last, and unknown till a whole round has asked about nothing else.
LAST = "the last"


@dataclass
class Outcome:
    """What was done to half messages, by the name that is their body, and what the server asked."""

    topic: str
    halves: dict[str, HalfRef]
    ends: dict[str, list[SendResult]]
    questions: dict[str, list[Half]] = field(default_factory=lambda: defaultdict(list))
    askers: list[set[str]] = field(default_factory=list)
    seen_before_anybody_listened: set[str] = field(default_factory=set)
    sent_instead: list[tuple[str, Resolution]] = field(default_factory=list)
    last_asked: str = ""
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def copies(self, name: str) -> int:
        return copies(self.topic, self.halves[name].message_id)

    def seen(self) -> set[str]:
        return {name for name in self.halves if self.copies(name)}

    def take(self, half: Half, listener: int) -> Resolution:
        """Answer a question."""
        name = half.body.decode()
        with self.lock:
            self.questions[name].append(half)
            self.askers[listener].add(name)
            self.is_over = self.is_over or self.last_asked == name == LAST
            self.last_asked = name
            answers = ANSWERED.get(name, [UNKNOWN if name == LAST and not self.is_over else COMMIT])
            answer = answers[min(len(self.questions[name]), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[RocketMQ]:
    server = the_server()
    yield server
    server.set("transactionTimeOut", FAST_CHECKS["transactionTimeOut"])


@pytest.fixture(scope="module")
def outcome(server: RocketMQ) -> Iterator[Outcome]:
    harness = RocketMQHarness()
    noted_before = noted_ends()
    acts = Acts(harness, harness.open())
    outcome = begin(harness, acts)
    outcome.halves |= send(acts, [LATE])
    for name, seconds in OFF.items():
        send_off(harness, outcome, name, seconds)
    ends = [end for ends in outcome.ends.values() for end in ends if end.ended in (Ended.COMMITTED, Ended.ROLLED_BACK)]
    wait_until(lambda: noted_ends() - noted_before >= len(ends), 60)
    server.set("transactionTimeOut", 500)
    wait_until(lambda: rounds(outcome.halves["commit in check"].message_id) >= 2, 60)  # they find nobody
    outcome.seen_before_anybody_listened = outcome.seen()
    server.set("transactionTimeOut", 600_000)  # nothing is asked until both listen
    listen(harness, outcome)
    wait_until(lambda: len(producers(outcome.topic)) == 2, 60)
    server.set("transactionTimeOut", 500)
    wait_until(lambda: set(ANSWERED) | {LATE} <= set(outcome.questions), 60)
    wanted = {name for name, answers in ANSWERED.items() if answers[-1] is COMMIT} | {LATE}
    wanted |= {text.format(name) for text in (COMMITTED, LEFT) for name in OFF}
    wait_until(lambda: wanted <= outcome.seen(), 60)
    outcome.halves |= send(acts, [LAST])
    wait_until(lambda: outcome.is_over, 60)  # what is to be asked again was, and what should not come has come
    yield outcome
    harness.close()


def begin(harness: RocketMQHarness, acts: Acts) -> Outcome:
    halves = send(acts, [*SAID, *ANSWERED])
    another = harness.open()
    ends = {name: [another.end([halves[name]], one)[0] for one in said] for name, said in SAID.items()}
    return Outcome(harness.topic(HALF), halves, ends)


def send(acts: Acts, names: list[str]) -> dict[str, HalfRef]:
    messages = [
        acts.message(HALF, body=name.encode(), key="4711 a", headers={"ce-about": "o:1", "who": "\x00"}) for name in names
    ]
    return dict(zip(names, acts.send_halves(*messages), strict=True))


def send_off(harness: RocketMQHarness, outcome: Outcome, name: str, seconds: float) -> None:
    known = harness.open()
    broker = RocketMQBroker(known.alias, known.options, list(known.topics.values()), now=lambda: time.time() + seconds)
    with closing(broker):
        outcome.halves |= send(Acts(harness, broker), [COMMITTED.format(name), LEFT.format(name)])
        outcome.ends[COMMITTED.format(name)] = broker.end([outcome.halves[COMMITTED.format(name)]], COMMIT)


def listen(harness: RocketMQHarness, outcome: Outcome) -> None:
    """Listen with two brokers. The one that is asked about the late half first commits it, and answers when it is visible."""
    outcome.askers = [set(), set()]
    another = harness.open()
    of_the_late = threading.Lock()

    def ask(half: Half, listener: int) -> Resolution:
        if half.body == LATE.encode():
            with of_the_late:
                if LATE not in outcome.ends:
                    outcome.ends[LATE] = another.end([outcome.halves[LATE]], COMMIT)
                    wait_until(lambda: outcome.copies(LATE))
        return outcome.take(half, listener)

    for listener in range(2):
        harness.open().listen(
            lambda half, listener=listener: ask(half, listener),
            on_other_answer=lambda half, resolution: outcome.sent_instead.append((half.body.decode(), resolution)),
        )


class TestCommit:
    def test_delivers_once_and_is_never_asked_about(self, outcome: Outcome):
        assert [end.ended for end in outcome.ends["commit"]] == [Ended.COMMITTED]
        assert outcome.copies("commit") == 1
        assert "commit" not in outcome.questions

    def test_makes_a_copy_each_time_it_is_said(self, outcome: Outcome):
        """So nobody but the one who has decided, or took over, says it."""
        assert [end.ended for end in outcome.ends["commit twice"]] == [Ended.COMMITTED, Ended.COMMITTED]
        assert outcome.copies("commit twice") == 2

    def test_stands_when_a_rollback_follows(self, outcome: Outcome):
        assert outcome.copies("commit, then rollback") == 1

    def test_makes_no_copy_beside_the_answer_to_a_check_that_is_outstanding(self, outcome: Outcome):
        [end] = outcome.ends[LATE]

        assert end.ended is Ended.COMMITTED
        assert (LATE, ROLLBACK) in outcome.sent_instead
        assert outcome.copies(LATE) == 1


class TestRollback:
    def test_delivers_nothing_and_is_never_asked_about(self, outcome: Outcome):
        assert [end.ended for end in outcome.ends["rollback"]] == [Ended.ROLLED_BACK]
        assert outcome.copies("rollback") == 0
        assert "rollback" not in outcome.questions

    def test_does_not_stand_when_a_commit_follows(self, outcome: Outcome):
        """The server remembers no end: what lies in its log can be committed."""
        assert [end.ended for end in outcome.ends["rollback, then commit"]] == [Ended.ROLLED_BACK, Ended.COMMITTED]
        assert outcome.copies("rollback, then commit") == 1


class TestCheck:
    def test_shows_the_half_as_it_was_sent(self, outcome: Outcome):
        half = outcome.halves["commit in check"]
        question = outcome.questions["commit in check"][0]

        assert (question.half_id, question.message_id, question.topic) == (half.half_id, half.message_id, half.topic)
        assert question.token.startswith("here:1:1:")
        assert (question.key, question.headers) == ("4711 a", {"ce-about": "o:1", "who": "\x00"})
        assert question.asked >= 1
        assert question.born_at is not None

    def test_commits(self, outcome: Outcome):
        assert outcome.copies("commit in check") >= 1

    def test_rolls_back_and_asks_no_more(self, outcome: Outcome):
        assert outcome.copies("rollback in check") == 0
        assert outcome.is_over

    @pytest.mark.parametrize("name", ["unknown, then commit", "error, then commit"])
    def test_is_repeated_while_nothing_is_known(self, outcome: Outcome, name: str):
        first, second = [half.asked for half in outcome.questions[name]][:2]

        assert second > first
        assert outcome.copies(name) >= 1

    def test_rolls_back_what_was_unknown_before(self, outcome: Outcome):
        assert len(outcome.questions["unknown, then rollback"]) >= 2
        assert outcome.copies("unknown, then rollback") == 0

    def test_ends_each_of_a_batch_in_its_own_way(self, outcome: Outcome):
        assert [outcome.copies(f"of five: {number}") > 0 for number in range(1, 6)] == [True, False, True, False, True]

    def test_waits_for_somebody_to_listen(self, outcome: Outcome):
        assert not outcome.seen_before_anybody_listened & (set(ANSWERED) | {LATE})

    def test_is_shared_between_two(self, outcome: Outcome):
        assert all(outcome.askers)
        assert all(outcome.copies(f"shared: {number}") for number in range(20))


class TestClockThatIsOff:
    @pytest.mark.parametrize("text", [COMMITTED, LEFT])
    @pytest.mark.parametrize("name", OFF)
    def test_loses_nothing(self, outcome: Outcome, name: str, text: str):
        assert outcome.copies(text.format(name)) >= 1
