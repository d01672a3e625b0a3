"""Checkers, with a broker that asks by itself whenever a test says so."""

import logging
from collections.abc import Callable, Iterator

import pytest

from outbox.brokers.capabilities import AsksProducers
from outbox.brokers.memory import MemoryBroker
from outbox.check_backs import loop as module
from outbox.check_backs.ask import log_sent
from outbox.check_backs.loop import Checker, listen_in_this_process
from outbox.message import COMMIT, ROLLBACK, Half, Resolution
from outbox.models import CheckBack, State
from tests.factories import BatchFactory
from tests.outbox.check_backs.halves import half_of

pytestmark = pytest.mark.django_db(transaction=True)

OnOtherAnswer = Callable[[Half, Resolution], None]

listening: list[tuple[Callable[[Half], Resolution], OnOtherAnswer | None]] = []


class AskingBroker(MemoryBroker, AsksProducers):
    """A memory broker that asks those who listen."""

    def listen(self, ask: Callable[[Half], Resolution], *, on_other_answer: OnOtherAnswer | None = None) -> None:
        listening.append((ask, on_other_answer))


def question_and_send(half: Half, sent: Resolution) -> Resolution:
    """Ask as a broker does that then sends another answer; return the decision."""
    ask, on_other_answer = listening[-1]
    decided = ask(half)
    assert on_other_answer is not None
    on_other_answer(half, sent)
    return decided


@pytest.fixture(autouse=True)
def _asking(settings, monkeypatch) -> Iterator[None]:
    backend = f"{AskingBroker.__module__}.{AskingBroker.__qualname__}"
    settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": backend}}}
    monkeypatch.setattr(module, "_listening", {})
    listening.clear()
    yield
    listening.clear()


@pytest.fixture
def half() -> Half:
    return half_of(BatchFactory(state=State.SENT, half_ids=["h"]))


class TestChecker:
    @pytest.fixture
    def start(self) -> Iterator[Callable[..., None]]:
        started: list[Checker] = []

        def start(**options) -> None:
            started.append(Checker("default", "default", module.in_process("default"), **options))
            started[-1].turn()

        yield start
        for checker in started:
            checker.close()

    def test_records_what_the_broker_was_sent_instead(self, start, half):
        start()

        assert question_and_send(half, ROLLBACK) is COMMIT

        row = CheckBack.objects.get()
        assert (row.answer, row.sent_answer) == ("COMMIT", "ROLLBACK")

    def test_only_logs_it_over_http(self, start, half, caplog):
        start(on_other_answer=log_sent)

        with caplog.at_level(logging.INFO, logger="outbox.check_back"):
            question_and_send(half, ROLLBACK)

        assert f"The broker was sent ROLLBACK about message {half.message_id}" in caplog.text
        assert CheckBack.objects.get().sent_answer == ""


class TestListenInThisProcess:
    def test_answers_and_records(self, half):
        listen_in_this_process("default", "default")

        assert question_and_send(half, ROLLBACK) is COMMIT
        assert CheckBack.objects.get().sent_answer == "ROLLBACK"

    def test_listens_once(self):
        listen_in_this_process("default", "default")
        listen_in_this_process("default", "default")

        assert len(listening) == 1
