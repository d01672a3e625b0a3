"""Half messages: hidden until they are ended, ended once."""

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Broker, Ended, HalfRef, SendStatus
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Resolution, TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import CHECK_AFTER, CHECK_INTERVAL, CHECK_LIMIT, Harness
from tests.waiting import run_at_once

HALF = TopicType.TRANSACTION

pytestmark = pytest.mark.needs("HalfMessages")


class TestHalf:
    def test_is_hidden_until_it_is_committed(self, acts: Acts):
        message = acts.message(HALF, body=b"order", key="4711", tag="placed", headers={"ce-type": "OrderPlaced"})

        [half] = acts.send_halves(message)

        assert acts.receive(HALF) == []
        assert acts.waiting(HALF) == 0
        assert [found.half_id for found in acts.find(message.message_id, "half")] == [half.half_id]
        assert acts.end(half) == [Ended.COMMITTED]
        [delivery] = acts.receive(HALF)
        assert (delivery.message_id, delivery.body, delivery.key) == (message.message_id, b"order", "4711")
        assert (delivery.tag, delivery.headers) == ("placed", {"ce-type": "OrderPlaced"})

    def test_is_never_delivered_once_rolled_back(self, acts: Acts):
        half = acts.half()

        assert acts.end(half, resolution=ROLLBACK) == [Ended.ROLLED_BACK]

        assert acts.receive(HALF) == []

    @pytest.mark.needs("remembers_ends")
    def test_is_found_as_rolled_back(self, acts: Acts):
        half = acts.half()

        acts.end(half, resolution=ROLLBACK)

        acts.find(half.message_id, "rolled_back")

    def test_has_an_id_of_its_own_at_each_send(self, acts: Acts):
        message = acts.message(HALF)

        first, second = acts.send_halves(message, message)

        assert first.half_id != second.half_id

    def test_has_the_id_that_it_was_given_before(self, acts: Acts, broker: Broker):
        message, other = acts.message(HALF), acts.message(HALF)
        half_id = broker.new_half_id(message.message_id)

        halves = acts.send_halves(other, replace(message, half_id=half_id))

        assert halves[1].half_id == half_id
        assert acts.end(halves[1]) == [Ended.COMMITTED]
        assert [delivery.message_id for delivery in acts.receive(HALF)] == [message.message_id]

    def test_is_given_another_id_each_time(self, broker: Broker):
        ids = {broker.new_half_id("m") for _ in range(3)}

        assert len(ids) == 3

    def test_gets_the_same_verdicts_as_a_message(self, acts: Acts, broker: Broker):
        bodies = [b"a", b"", b"x" * (broker.max_body_bytes + 1)]

        outcomes = broker.send_halves([acts.message(HALF, body=body) for body in bodies])

        assert [outcome.status for outcome in outcomes] == [SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.REFUSED]
        assert [bool(outcome.half_id) for outcome in outcomes] == [True, False, False]

    def test_is_surely_not_stored_when_the_server_is_away(self, acts: Acts, harness: Harness):
        away = harness.open_unreachable()

        [outcome] = away.send_halves([acts.message(HALF)])

        assert outcome.status is SendStatus.UNAVAILABLE

    @pytest.mark.needs("remembers_ends")
    def test_is_not_ended_when_the_server_is_away(self, harness: Harness):
        away = harness.open_unreachable()

        [outcome] = away.end([HalfRef("t", "1", "m")], COMMIT)

        assert outcome.status is SendStatus.UNAVAILABLE


@pytest.mark.needs("NeedsCheckLoop")
class TestCheckLoop:
    def test_asks_no_sooner_than_said(self, acts: Acts, broker: Broker, harness: Harness):
        acts.half()

        harness.pass_time(CHECK_AFTER * 0.9)

        assert broker.check_halves(lambda half: COMMIT) == 0

    def test_shows_the_half_as_it_was_sent(self, acts: Acts, broker: Broker, harness: Harness):
        message = acts.message(HALF, body=b"order", key="4711", headers={"ce-about": "shop.order:1"})
        message = replace(message, half_id=broker.new_half_id(message.message_id))
        asked: list[Half] = []
        acts.send_halves(message)
        born_at = harness.now

        harness.pass_time(CHECK_AFTER)
        broker.check_halves(lambda half: asked.append(half) or UNKNOWN)

        expected = Half(message.topic, message.message_id, message.half_id, message.token, 1, born_at, "4711", {}, b"order")
        assert asked == [Half(**{**{name: getattr(expected, name) for name in expected.__slots__}, "headers": message.headers})]

    @pytest.mark.parametrize(("answer", "ended"), [(COMMIT, Ended.COMMITTED), (ROLLBACK, Ended.ROLLED_BACK)])
    def test_ends_the_half_as_answered(self, acts: Acts, broker: Broker, harness: Harness, answer: Resolution, ended: Ended):
        half = acts.half()

        harness.pass_time(CHECK_AFTER)
        count = broker.check_halves(lambda half: answer)

        assert count == 1
        assert not harness.remembers_ends or acts.end(half, resolution=ROLLBACK) == [ended]
        assert len(acts.receive(HALF)) == (1 if answer is COMMIT else 0)

    def test_does_not_ask_about_an_ended_half(self, acts: Acts, broker: Broker, harness: Harness):
        acts.end(acts.half())
        acts.end(acts.half(), resolution=ROLLBACK)

        harness.pass_time(CHECK_AFTER)

        assert broker.check_halves(lambda half: COMMIT) == 0

    def test_takes_an_exception_for_unknown(self, acts: Acts, broker: Broker, harness: Harness):
        def fail(half: Half) -> Resolution:
            raise ConnectionError("nobody there")

        acts.half()
        harness.pass_time(CHECK_AFTER)

        assert broker.check_halves(fail) == 1

        assert acts.receive(HALF) == []
        harness.pass_time(CHECK_INTERVAL)
        assert broker.check_halves(lambda half: COMMIT) == 1
        assert len(acts.receive(HALF)) == 1

    def test_asks_no_more_than_the_limit_and_takes_an_end_after_it(self, acts: Acts, broker: Broker, harness: Harness):
        half = acts.half()
        harness.pass_time(CHECK_AFTER)
        numbers: list[int] = []

        for _ in range(CHECK_LIMIT + 2):
            broker.check_halves(lambda half: numbers.append(half.asked) or UNKNOWN)
            harness.pass_time(CHECK_INTERVAL * 100)

        assert numbers == list(range(1, CHECK_LIMIT + 1))
        assert acts.end(half) == [Ended.COMMITTED]
        assert len(acts.receive(HALF)) == 1

    def test_asks_at_most_so_many_at_once(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_halves(*[acts.message(HALF) for _ in range(5)])
        harness.pass_time(CHECK_AFTER)

        counts = [broker.check_halves(lambda half: UNKNOWN, limit=3) for _ in range(3)]

        assert counts == [3, 2, 0]

    def test_asks_once_when_two_loops_run(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_halves(*[acts.message(HALF) for _ in range(50)])
        harness.pass_time(CHECK_AFTER)
        asked: list[str] = []

        def loop(mine: Broker) -> None:
            while mine.check_halves(lambda half: asked.append(half.half_id) or UNKNOWN, limit=7):
                pass

        run_at_once(loop, harness.open(), harness.open())

        assert len(asked) == len(set(asked)) == 50
