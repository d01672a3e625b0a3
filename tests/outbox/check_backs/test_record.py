from msgspec.structs import replace

from outbox.check_backs.answer import note_sent, record
from outbox.check_backs.resolve import Answer
from outbox.check_backs.sources import About
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half
from outbox.models import CheckBack

HALF = Half("orders", "m-1", "h-1", "source:17:1:1", asked=3)


def write(connection, half=HALF, answer=Answer(UNKNOWN, "its lease is alive"), request_id="r-1"):  # noqa: B008  (frozen)
    return record(connection, half, answer, request_id=request_id, asked_by="endpoint", milliseconds=1.5)


class TestRecord:
    def test_writes_down_who_asked_what_and_was_told_what(self, connection):
        assert write(connection, answer=Answer(COMMIT, "was decided", About.EXISTS))

        row = CheckBack.objects.get()
        assert (row.request_id, row.asked_by, row.asked) == ("r-1", "endpoint", 3)
        assert (row.topic, row.message_id, row.half_id, row.token) == ("orders", "m-1", "h-1", "source:17:1:1")
        assert (row.answer, row.reason, row.about, row.milliseconds) == ("COMMIT", "was decided", "exists", 1.5)

    def test_writes_each_question_down(self, connection):
        write(connection, request_id="r-1")
        write(connection, request_id="r-2")

        assert CheckBack.objects.count() == 2

    def test_keeps_one_row_with_the_last_answer_of_a_request_that_came_again(self, connection):
        write(connection)

        assert write(connection, answer=Answer(COMMIT, "was decided", About.EXISTS))

        row = CheckBack.objects.get()
        assert (row.answer, row.reason, row.about) == ("COMMIT", "was decided", "exists")

    def test_keeps_what_it_wrote_when_the_id_comes_with_another_half(self, connection):
        write(connection)

        for other in ({"topic": "x"}, {"message_id": "x"}, {"half_id": "x"}, {"token": "x"}):
            assert not write(connection, replace(HALF, **other), Answer(COMMIT, "was decided"))

        assert CheckBack.objects.get().answer == "UNKNOWN"


class TestNoteSent:
    def test_keeps_the_decision(self, connection):
        write(connection, answer=Answer(COMMIT, "was decided"))

        assert note_sent(connection, HALF, ROLLBACK)

        row = CheckBack.objects.get()
        assert (row.answer, row.sent_answer, row.reason) == ("COMMIT", "ROLLBACK", "was decided")

    def test_is_of_the_newest_row_of_that_question(self, connection):
        write(connection, request_id="r-1")
        write(connection, request_id="r-2")
        write(connection, replace(HALF, asked=4), request_id="r-3")

        note_sent(connection, HALF, ROLLBACK)

        assert list(CheckBack.objects.order_by("id").values_list("sent_answer", flat=True)) == ["", "ROLLBACK", ""]

    def test_tells_where_no_such_question_is_recorded(self, connection):
        write(connection)

        for other in ({"message_id": "x"}, {"half_id": "x"}, {"asked": 9}):
            assert not note_sent(connection, replace(HALF, **other), ROLLBACK)

        assert CheckBack.objects.get().sent_answer == ""

    def test_is_forgotten_where_the_request_comes_again(self, connection):
        write(connection)
        note_sent(connection, HALF, ROLLBACK)

        write(connection)

        assert CheckBack.objects.get().sent_answer == ""
