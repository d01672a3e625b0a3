"""
How half messages end on a real server: the cases of RocketMQ's own end-to-end suite, and some that it does not know.

All halves take their ways side by side, since each way is waiting; the tests look at where they led. What arrived is
counted in the server's log by key, where a copy is seen that no consumer was handed.
"""

from __future__ import annotations

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
class Story:
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
def story(server: RocketMQ) -> Iterator[Story]:
    harness = RocketMQHarness()
    noted_before = noted_ends()
    acts = Acts(harness, harness.open())
    story = begin(harness, acts)
    story.halves |= send(acts, [LATE])
    for name, seconds in OFF.items():
        send_off(harness, story, name, seconds)
    ends = [end for ends in story.ends.values() for end in ends if end.ended in (Ended.COMMITTED, Ended.ROLLED_BACK)]
    wait_until(lambda: noted_ends() - noted_before >= len(ends), 60)
    server.set("transactionTimeOut", 500)
    wait_until(lambda: rounds(story.halves["commit in check"].message_id) >= 2, 60)  # they find nobody
    story.seen_before_anybody_listened = story.seen()
    server.set("transactionTimeOut", 600_000)  # nothing is asked until both listen
    listen(harness, story)
    wait_until(lambda: len(producers(story.topic)) == 2, 60)
    server.set("transactionTimeOut", 500)
    wait_until(lambda: set(ANSWERED) | {LATE} <= set(story.questions), 60)
    wanted = {name for name, answers in ANSWERED.items() if answers[-1] is COMMIT} | {LATE}
    wanted |= {text.format(name) for text in (COMMITTED, LEFT) for name in OFF}
    wait_until(lambda: wanted <= story.seen(), 60)
    story.halves |= send(acts, [LAST])
    wait_until(lambda: story.is_over, 60)  # what is to be asked again was, and what should not come has come
    yield story
    harness.close()


def begin(harness: RocketMQHarness, acts: Acts) -> Story:
    halves = send(acts, [*SAID, *ANSWERED])
    another = harness.open()
    ends = {name: [another.end([halves[name]], one)[0] for one in said] for name, said in SAID.items()}
    return Story(harness.topic(HALF), halves, ends)


def send(acts: Acts, names: list[str]) -> dict[str, HalfRef]:
    messages = [
        acts.message(HALF, body=name.encode(), key="4711 a", headers={"ce-about": "o:1", "who": "\x00"}) for name in names
    ]
    return dict(zip(names, acts.send_halves(*messages), strict=True))


def send_off(harness: RocketMQHarness, story: Story, name: str, seconds: float) -> None:
    known = harness.open()
    broker = RocketMQBroker(known.alias, known.options, list(known.topics.values()), now=lambda: time.time() + seconds)
    with closing(broker):
        story.halves |= send(Acts(harness, broker), [COMMITTED.format(name), LEFT.format(name)])
        story.ends[COMMITTED.format(name)] = broker.end([story.halves[COMMITTED.format(name)]], COMMIT)


def listen(harness: RocketMQHarness, story: Story) -> None:
    """Have two listen. Whoever hears of the late half first commits it, and answers when it is visible."""
    story.askers = [set(), set()]
    another = harness.open()
    of_the_late = threading.Lock()

    def ask(half: Half, listener: int) -> Resolution:
        if half.body == LATE.encode():
            with of_the_late:
                if LATE not in story.ends:
                    story.ends[LATE] = another.end([story.halves[LATE]], COMMIT)
                    wait_until(lambda: story.copies(LATE))
        return story.take(half, listener)

    for listener in range(2):
        harness.open().listen(
            lambda half, listener=listener: ask(half, listener),
            note_sent=lambda half, resolution: story.sent_instead.append((half.body.decode(), resolution)),
        )


class TestCommit:
    def test_delivers_once_and_is_never_asked_about(self, story: Story):
        assert [end.ended for end in story.ends["commit"]] == [Ended.COMMITTED]
        assert story.copies("commit") == 1
        assert "commit" not in story.questions

    def test_makes_a_copy_each_time_it_is_said(self, story: Story):
        """So nobody but the one who has decided, or took over, says it."""
        assert [end.ended for end in story.ends["commit twice"]] == [Ended.COMMITTED, Ended.COMMITTED]
        assert story.copies("commit twice") == 2

    def test_stands_when_a_rollback_follows(self, story: Story):
        assert story.copies("commit, then rollback") == 1

    def test_makes_no_copy_beside_the_answer_to_a_check_that_is_outstanding(self, story: Story):
        [end] = story.ends[LATE]

        assert end.ended is Ended.COMMITTED
        assert (LATE, ROLLBACK) in story.sent_instead
        assert story.copies(LATE) == 1


class TestRollback:
    def test_delivers_nothing_and_is_never_asked_about(self, story: Story):
        assert [end.ended for end in story.ends["rollback"]] == [Ended.ROLLED_BACK]
        assert story.copies("rollback") == 0
        assert "rollback" not in story.questions

    def test_does_not_stand_when_a_commit_follows(self, story: Story):
        """The server remembers no end: what lies in its log can be committed."""
        assert [end.ended for end in story.ends["rollback, then commit"]] == [Ended.ROLLED_BACK, Ended.COMMITTED]
        assert story.copies("rollback, then commit") == 1


class TestCheck:
    def test_shows_the_half_as_it_was_sent(self, story: Story):
        half = story.halves["commit in check"]
        question = story.questions["commit in check"][0]

        assert (question.half_id, question.message_id, question.topic) == (half.half_id, half.message_id, half.topic)
        assert question.token.startswith("here:1:1:")
        assert (question.key, question.headers) == ("4711 a", {"ce-about": "o:1", "who": "\x00"})
        assert question.asked >= 1
        assert question.born_at is not None

    def test_commits(self, story: Story):
        assert story.copies("commit in check") >= 1

    def test_rolls_back_and_asks_no_more(self, story: Story):
        assert story.copies("rollback in check") == 0
        assert story.is_over

    @pytest.mark.parametrize("name", ["unknown, then commit", "error, then commit"])
    def test_is_repeated_while_nothing_is_known(self, story: Story, name: str):
        first, second = [half.asked for half in story.questions[name]][:2]

        assert second > first
        assert story.copies(name) >= 1

    def test_rolls_back_what_was_unknown_before(self, story: Story):
        assert len(story.questions["unknown, then rollback"]) >= 2
        assert story.copies("unknown, then rollback") == 0

    def test_ends_each_of_a_batch_in_its_own_way(self, story: Story):
        assert [story.copies(f"of five: {number}") > 0 for number in range(1, 6)] == [True, False, True, False, True]

    def test_waits_for_somebody_to_listen(self, story: Story):
        assert not story.seen_before_anybody_listened & (set(ANSWERED) | {LATE})

    def test_is_shared_between_two(self, story: Story):
        assert all(story.askers)
        assert all(story.copies(f"shared: {number}") for number in range(20))


class TestClockThatIsOff:
    @pytest.mark.parametrize("text", [COMMITTED, LEFT])
    @pytest.mark.parametrize("name", OFF)
    def test_loses_nothing(self, story: Story, name: str, text: str):
        assert story.copies(text.format(name)) >= 1
