"""The commit of the half message at the broker, after the database's commit."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.brokers.base import Ended, EndSemantics, SendStatus
from outbox.message import COMMIT, UNKNOWN, Half
from outbox.models import Batch, State
from tests.outbox.half_first.orders import (
    ask,
    make_group,
)


class TestTheBrokersCommit:
    def test_names_the_place_where_the_half_message_is_stored(self, memory):
        memory.fail("end", SendStatus.UNSURE, where=lambda half: half.place != "0")

        make_group()

        assert Batch.objects.get().state == State.SENT

    def test_is_left_open_where_it_had_no_answer(self, memory, caplog):
        memory.fail("end", SendStatus.UNSURE)

        make_group()

        assert Batch.objects.get().state == State.PREPARED
        assert "could not be committed yet" in caplog.text

    def test_costs_the_caller_nothing_where_it_fails(self, memory, monkeypatch, caplog):
        def end(*args, **options):
            raise ConnectionError

        monkeypatch.setattr(type(memory), "end", end)

        assert make_group().pk

        assert Batch.objects.get().state == State.PREPARED
        assert "Error calling HalfFirstMessage.commit" in caplog.text

    @pytest.mark.parametrize(
        ("end", "seconds", "ended"),
        [
            (EndSemantics.STATELESS, 1.9, Ended.COMMITTED),
            (EndSemantics.STATELESS, 2.0, None),
            (EndSemantics.IDEMPOTENT, 2.0, Ended.COMMITTED),
        ],
    )
    def test_does_not_meet_a_check_where_that_would_make_a_copy(self, use_memory, monkeypatch, end, seconds, ended):
        memory = use_memory(end)
        times = iter([100.0, 100.0 + seconds])
        monkeypatch.setattr("outbox.half_first.message.monotonic", lambda: next(times))
        calls = []
        send_end = type(memory).end

        def listen(self, *args, **options):
            calls.append(args)
            return send_end(self, *args, **options)

        monkeypatch.setattr(type(memory), "end", listen)
        make_group()

        assert len(calls) == (1 if ended else 0)
        assert [half.ended for half in memory.halves()] == [ended]
        assert Batch.objects.get().state == (State.SENT if ended else State.PREPARED)

    @pytest.mark.parametrize("end", [EndSemantics.STATELESS, EndSemantics.IDEMPOTENT])
    def test_is_its_own_for_a_window_that_is_written_with_the_batch(self, use_memory, end):
        use_memory(end)

        make_group()

        batch = Batch.objects.get()
        assert batch.half_places == ["0"]  # noted by the transaction, so whoever ends it in its place knows
        if end is EndSemantics.IDEMPOTENT:
            assert batch.ends_until is None
        else:
            assert timedelta(seconds=1.9) < batch.ends_until - batch.decided_at < timedelta(seconds=2.1)

    def test_gets_what_is_left_of_the_window_and_names_its_source(self, use_memory, monkeypatch):
        memory = use_memory(EndSemantics.STATELESS)
        times = iter([100.0, 100.5])
        monkeypatch.setattr("outbox.half_first.message.monotonic", lambda: next(times))
        heard = []
        end = type(memory).end

        def listen(self, halves, resolution, *, within=None):
            heard.append((halves[0].source, within))
            return end(self, halves, resolution, within=within)

        monkeypatch.setattr(type(memory), "end", listen)
        make_group()

        (source,) = database.raw("default").execute("SELECT id FROM outbox_source").fetchone()
        assert heard == [(source, timedelta(seconds=1.5))]

    @pytest.mark.parametrize("seconds", [-1, 1])
    def test_is_beside_no_check_back(self, use_memory, seconds):
        """Of the half message that this process may end, and of one whose time is over."""
        memory = use_memory(EndSemantics.STATELESS)
        memory.fail("end", SendStatus.UNSURE)
        make_group()
        [half] = memory.halves()
        Batch.objects.update(ends_until=datetime.now(UTC) + timedelta(seconds=60 * seconds))

        answer = ask(Half("orders", half.message.message_id, half.id, half.message.token))

        assert answer is (UNKNOWN if seconds > 0 else COMMIT)
