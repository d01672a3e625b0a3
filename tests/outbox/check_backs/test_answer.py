import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections
from msgspec.structs import replace

from outbox import signals
from outbox.check_backs.answer import answer, record_sent
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Token
from outbox.models import Batch, CheckBack, State
from tests.factories import BatchFactory
from tests.outbox.check_backs.halves import half_of
from tests.waiting import wait_until_it_blocks

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class OtherBatchFactory(BatchFactory):
    class Meta:
        database = "other"


@pytest.fixture
def sent():
    return half_of(BatchFactory(state=State.SENT, half_ids=["h"]))


@pytest.fixture
def left_behind():
    """The half of a relay that let its lease run out: to answer, the check-back must write."""
    return half_of(BatchFactory(state=State.CLAIMED, lease_until=datetime.now(UTC) - timedelta(seconds=1)))


class TestAnswer:
    def test_gives_what_the_table_says_and_records_it(self, sent):
        given = answer(replace(sent, asked=2), asked_by="command", request_id="r-1")

        assert given.resolution is COMMIT
        row = CheckBack.objects.get()
        assert (row.request_id, row.asked_by, row.asked, row.answer) == ("r-1", "command", 2, "COMMIT")
        assert row.reason == given.reason
        assert 0 < row.milliseconds < 10_000

    def test_makes_an_id_for_a_question_that_has_none(self, sent):
        answer(sent, asked_by="broker")
        answer(sent, asked_by="broker")

        assert CheckBack.objects.count() == 2

    def test_reads_and_records_in_the_database_that_the_token_names(self):
        batch = OtherBatchFactory(state=State.SENT, half_ids=["h"])

        given = answer(half_of(batch), asked_by="broker", using="default")

        assert given.resolution is COMMIT
        assert CheckBack.objects.using("other").count() == 1
        assert CheckBack.objects.using("default").count() == 0

    def test_sends_an_alert_for_the_batch_of_a_database_it_does_not_know(self, sent, alerts):
        given = answer(replace(sent, token="urn:uuid:elsewhere:17:1:1"), asked_by="broker")

        assert given.resolution is UNKNOWN
        assert [alert["details"]["message_id"] for alert in alerts] == [sent.message_id]
        assert CheckBack.objects.get().answer == "UNKNOWN"

    def test_says_unknown_to_an_id_that_asked_about_another_half(self, sent, left_behind, alerts):
        answer(left_behind, asked_by="endpoint", request_id="r-1")

        given = answer(sent, asked_by="endpoint", request_id="r-1")

        assert given.resolution is UNKNOWN
        assert "'r-1'" in alerts[0]["reason"]

    def test_gives_a_settled_fact_even_when_it_cannot_be_recorded(self, sent, caplog):
        given = answer(replace(sent, asked=2**40), asked_by="broker")

        assert given.resolution is COMMIT
        assert f"message {sent.message_id} could not be recorded" in caplog.text

    def test_announces_what_it_gave(self, sent):
        heard = []

        def hear(**announced):
            heard.append(announced)
            raise RuntimeError("a listener's own trouble")

        signals.check_back_answered.connect(hear)
        given = answer(sent, asked_by="broker")
        signals.check_back_answered.disconnect(hear)

        assert [(one["half"], one["answer"]) for one in heard] == [(sent, given)]


class TestAnswerInTrouble:
    def test_does_not_wait_for_a_lock_on_the_batch(self, settings, left_behind, other_connection):
        settings.OUTBOX = {"CHECK_BACK": {"LOCK_TIMEOUT": timedelta(seconds=0.1)}}

        with other_connection.transaction():
            other_connection.execute("SELECT FROM outbox_batch FOR UPDATE")
            given, seconds = timed(left_behind)

        assert given.resolution is UNKNOWN
        assert seconds < 2
        assert CheckBack.objects.get().answer == "UNKNOWN"
        assert answer(left_behind, asked_by="broker").resolution is ROLLBACK

    def test_does_not_work_longer_than_it_may(self, settings, monkeypatch, left_behind, other_connection):
        settings.OUTBOX = {"CHECK_BACK": {"LOCK_TIMEOUT": timedelta(seconds=60)}}
        monkeypatch.setattr("outbox.check_backs.sources.STATEMENT_TIMEOUT", timedelta(seconds=0.1))

        with other_connection.transaction():
            other_connection.execute("SELECT FROM outbox_batch FOR UPDATE")
            given, seconds = timed(left_behind)

        assert given.resolution is UNKNOWN
        assert seconds < 2

    def test_reads_past_a_row_that_is_locked(self, sent, other_connection):
        with other_connection.transaction():
            other_connection.execute("SELECT FROM outbox_batch FOR UPDATE")

            assert answer(sent, asked_by="broker").resolution is COMMIT

    def test_says_unknown_while_the_database_is_away(self, sent, monkeypatch, caplog):
        with monkeypatch.context() as patch:
            patch.setitem(connections["default"].settings_dict, "PORT", 1)
            given = answer(sent, asked_by="broker")

        assert given.resolution is UNKNOWN
        assert "127.0.0.1" not in given.reason
        assert f"message {sent.message_id} could not be recorded" in caplog.text

    def test_says_unknown_when_its_connection_is_cut(self, settings, monkeypatch, left_behind, other_connection):
        settings.OUTBOX = {"CHECK_BACK": {"LOCK_TIMEOUT": timedelta(seconds=60)}}
        monkeypatch.setattr("outbox.check_backs.sources.STATEMENT_TIMEOUT", timedelta(seconds=60))
        answers = []
        asking = threading.Thread(target=lambda: answers.append(answer(left_behind, asked_by="broker")))

        with other_connection.transaction():
            other_connection.execute("SELECT FROM outbox_batch FOR UPDATE")
            asking.start()
            pid = wait_until_it_blocks(other_connection)
            other_connection.execute("SELECT pg_terminate_backend(%s)", [pid])
            asking.join(10)

        assert [given.resolution for given in answers] == [UNKNOWN]
        assert stored_state(left_behind) == State.CLAIMED

    def test_says_unknown_to_a_position_beyond_all_bounds(self, sent):
        source, batch, attempt, _ = sent.token.rsplit(":", 3)

        given = answer(replace(sent, token=f"{source}:{batch}:{attempt}:{10**20}"), asked_by="broker")

        assert given.resolution is UNKNOWN

    def test_says_unknown_when_its_settings_are_wrong(self, settings, sent):
        settings.OUTBOX = {"CHECK_BACK": {"LOCK_TIMEOUT": "soon"}}

        assert answer(sent, asked_by="broker").resolution is UNKNOWN


def timed(half):
    started = time.monotonic()
    given = answer(half, asked_by="broker")
    return given, time.monotonic() - started


def stored_state(half):
    return Batch.objects.get(pk=Token.parse(half.token).batch).state


class TestRecordSent:
    def test_records_it_in_the_database_that_the_token_names(self):
        half = half_of(OtherBatchFactory(state=State.SENT, half_ids=["h"]))
        answer(half, asked_by="broker", using="default")

        record_sent(half, ROLLBACK, using="default")

        row = CheckBack.objects.using("other").get()
        assert (row.answer, row.sent_answer) == ("COMMIT", "ROLLBACK")

    def test_does_not_raise_where_nothing_is_recorded(self, sent, caplog):
        record_sent(sent, ROLLBACK)

        assert "could not be recorded" in caplog.text

    def test_does_not_raise_where_the_database_is_away(self, sent, monkeypatch, caplog):
        def fail(alias):
            raise OSError("away")

        monkeypatch.setattr("outbox.check_backs.sources.connect", fail)

        record_sent(sent, ROLLBACK)

        assert "could not be recorded" in caplog.text
