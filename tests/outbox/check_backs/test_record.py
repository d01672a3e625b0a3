from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from outbox.check_backs import answer as module
from outbox.check_backs import sources
from outbox.check_backs.answer import answer, record_sent
from outbox.check_backs.resolve import Answer
from outbox.check_backs.sources import About
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half
from outbox.models import CheckBack

HALF = Half("orders", "m-1", "h-1", "source:17:1:1", asked=3)
DECIDED = Answer(COMMIT, "was decided", About.EXISTS)


@pytest.fixture
def ask(connection, monkeypatch):
    """Return a function that asks about a half message, and has the question answered as given."""
    monkeypatch.setattr(sources, "connect", lambda alias: nullcontext(connection))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=count(step=0.0015).__next__))

    def ask(half=HALF, given=Answer(UNKNOWN, "its lease is alive"), request_id="r-1"):  # noqa: B008  (frozen)
        monkeypatch.setattr(module, "resolve", lambda connection, half: given)
        return answer(half, asked_by="endpoint", request_id=request_id)

    return ask


class TestRecord:
    def test_writes_down_who_asked_what_and_was_told_what(self, ask):
        assert ask(given=DECIDED) == DECIDED

        row = CheckBack.objects.get()
        assert (row.request_id, row.asked_by, row.asked) == ("r-1", "endpoint", 3)
        assert (row.topic, row.message_id, row.half_id, row.token) == ("orders", "m-1", "h-1", "source:17:1:1")
        assert (row.answer, row.reason, row.about, row.milliseconds) == ("COMMIT", "was decided", "exists", pytest.approx(1.5))

    def test_writes_each_question_down(self, ask):
        ask(request_id="r-1")
        ask(request_id="r-2")

        assert CheckBack.objects.count() == 2

    def test_keeps_one_row_with_the_last_answer_of_a_request_that_came_again(self, ask):
        ask()

        assert ask(given=DECIDED) == DECIDED

        row = CheckBack.objects.get()
        assert (row.answer, row.reason, row.about) == ("COMMIT", "was decided", "exists")

    def test_keeps_what_it_wrote_when_the_id_comes_with_another_half(self, ask):
        ask()

        for other in ({"topic": "x"}, {"message_id": "x"}, {"half_id": "x"}, {"token": "x"}):
            assert ask(replace(HALF, **other), DECIDED).resolution is UNKNOWN

        assert CheckBack.objects.get().answer == "UNKNOWN"


class TestRecordSent:
    def test_keeps_the_decision(self, ask):
        ask(given=DECIDED)

        record_sent(HALF, ROLLBACK)

        row = CheckBack.objects.get()
        assert (row.answer, row.sent_answer, row.reason) == ("COMMIT", "ROLLBACK", "was decided")

    def test_is_of_the_newest_row_of_that_question(self, ask):
        ask(request_id="r-1")
        ask(request_id="r-2")
        ask(replace(HALF, asked=4), request_id="r-3")

        record_sent(HALF, ROLLBACK)

        assert list(CheckBack.objects.order_by("id").values_list("sent_answer", flat=True)) == ["", "ROLLBACK", ""]

    def test_tells_where_no_such_question_is_recorded(self, ask, caplog):
        ask()

        for other in ({"message_id": "x"}, {"half_id": "x"}, {"asked": 9}):
            record_sent(replace(HALF, **other), ROLLBACK)

        assert caplog.text.count("which could not be recorded") == 2  # the third line is like the second
        assert CheckBack.objects.get().sent_answer == ""

    def test_is_forgotten_where_the_request_comes_again(self, ask):
        ask()
        record_sent(HALF, ROLLBACK)

        ask()

        assert CheckBack.objects.get().sent_answer == ""
