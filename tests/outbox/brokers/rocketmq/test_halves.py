"""Half messages, ended at the brokers' own ports. Needs no server, but stubs of ours."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Broker, Ended, HalfRef, Outgoing, SendStatus
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import RemotingConnection
from outbox.message import COMMIT, ROLLBACK, Resolution
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.outbox.brokers.rocketmq.stub import Stub

OpenHere = Callable[..., Broker]

TOPIC = "transaction"
END = requests.END_TRANSACTION
SHORT = timedelta(milliseconds=300)


def halves(broker: Broker, count: int = 1) -> list[HalfRef]:
    """Send half messages."""
    outcomes = broker.send_halves([Outgoing(f"m{number}", TOPIC, b"{}", token="here:1:1:1") for number in range(count)])
    return [HalfRef(TOPIC, one.half_id, f"m{number}", one.place) for number, one in enumerate(outcomes)]


@pytest.fixture
def broker(open_here: OpenHere) -> Broker:
    return open_here()


class TestSend:
    def test_says_where_a_half_message_is_stored(self, port: PortStub, open_here: OpenHere):
        first, second = halves(open_here(), 2)

        stored = {one.properties["UNIQ_KEY"]: one for one in port.log.messages.values()}
        assert first.place == f"broker-a {stored[first.half_id].log_offset} {stored[first.half_id].queue_offset}"
        assert second.place == f"broker-a {stored[second.half_id].log_offset} {stored[second.half_id].queue_offset}"


class TestEnd:
    @pytest.mark.parametrize(
        ("resolution", "ended", "kind", "copies"),
        [(COMMIT, Ended.COMMITTED, requests.COMMIT_TYPE, 1), (ROLLBACK, Ended.ROLLED_BACK, requests.ROLLBACK_TYPE, 0)],
    )
    def test_is_done_at_the_place(
        self, port: PortStub, resolution: Resolution, ended: Ended, broker: Broker, kind: int, copies: int
    ):
        _, half = halves(broker, 2)

        [outcome] = broker.end([half], resolution)

        assert (outcome.status, outcome.ended) == (SendStatus.ACCEPTED, ended)
        assert [(one.half_id, one.kind) for one in port.log.ends] == [(half.half_id, kind)]
        assert [one.properties["UNIQ_KEY"] for one in port.log.of(TOPIC)] == [half.half_id] * copies

    def test_is_answered_in_the_order_of_the_halves(self, broker: Broker):
        first, second = halves(broker, 2)
        nowhere = replace(first, place="broker-a 77000 5")

        outcomes = broker.end([second, nowhere, first], COMMIT)

        assert [one.ended for one in outcomes] == [Ended.COMMITTED, Ended.NOT_FOUND, Ended.COMMITTED]

    def test_finds_by_its_id_one_whose_place_is_not_known(self, port: PortStub, open_here: OpenHere):
        [half] = halves(open_here())

        [outcome] = open_here().end([replace(half, place="")], COMMIT)

        assert outcome.ended is Ended.COMMITTED
        assert [one.half_id for one in port.log.ends] == [half.half_id]

    def test_is_not_found_without_a_place_and_by_its_id(self, port: PortStub, broker: Broker):
        [half] = halves(broker)

        [outcome] = broker.end([replace(half, half_id="m.0", place="")], COMMIT)

        assert (outcome.status, outcome.ended) == (SendStatus.ACCEPTED, Ended.NOT_FOUND)
        assert port.asked(END) == []

    def test_does_not_leave_where_it_cannot_be_looked_for(self, port: PortStub, broker: Broker):
        [half] = halves(broker)
        port.say(requests.QUERY_MESSAGE, 2, "[TIMEOUT_CLEAN_QUEUE]")

        [outcome] = broker.end([replace(half, place="")], COMMIT)

        assert (outcome.status, outcome.ended) == (SendStatus.UNAVAILABLE, None)
        assert port.asked(END) == []

    def test_is_not_asked_of_a_broker_that_serves_the_topic_no_more(self, port: PortStub, broker: Broker):
        [half] = halves(broker)

        [outcome] = broker.end([replace(half, place=half.place.replace("broker-a", "broker-z"))], COMMIT)

        assert (outcome.status, outcome.ended) == (SendStatus.UNAVAILABLE, None)
        assert "broker-z" in outcome.reason
        assert port.asked(END) == []

    def test_goes_to_the_broker_that_has_the_half_message(self, stub: Stub, port: PortStub, open_here: OpenHere):
        other = PortStub("broker-b")
        port.brokers, stub.brokers = [port, other], [stub, stub]
        broker = open_here()
        refs = halves(broker, 20)

        outcomes = broker.end(refs, COMMIT)

        assert {one.ended for one in outcomes} == {Ended.COMMITTED}
        assert {one.half_id for one in port.log.ends} == {one.half_id for one in refs if one.place.startswith("broker-a ")}
        assert len(port.log.ends) + len(other.log.ends) == 20 > len(port.log.ends) > 0
        other.stop()


class TestAnswer:
    @pytest.mark.parametrize(
        ("code", "text", "status", "ended"),
        [
            (1, "Find prepared transaction message failed", SendStatus.ACCEPTED, Ended.NOT_FOUND),
            (1, "store putMessage return null", SendStatus.UNSURE, None),
            (2, "[TIMEOUT_CLEAN_QUEUE]", SendStatus.UNAVAILABLE, None),
            (16, "no permission", SendStatus.MISCONFIGURED, None),
        ],
    )
    def test_decides(self, port: PortStub, broker: Broker, code: int, text: str, status: SendStatus, ended: Ended | None):
        [half] = halves(broker)
        port.say(END, code, text)

        [outcome] = broker.end([half], COMMIT)

        assert (outcome.status, outcome.ended) == (status, ended)
        assert f"{code} {text}" in outcome.reason
        assert len(port.asked(END)) == 1

    @pytest.mark.parametrize("does", [False, True])
    def test_that_is_lost_leaves_it_unsure_and_nothing_is_repeated(self, port: PortStub, broker: Broker, does: bool):
        [half] = halves(broker)
        port.close_at(END, does=does, times=1)

        [outcome] = broker.end([half], COMMIT)

        assert (outcome.status, outcome.ended) == (SendStatus.UNSURE, None)
        assert len(port.asked(END)) == 1
        assert len(port.log.ends) == does

    def test_that_does_not_come_in_time_leaves_it_unsure(self, port: PortStub, open_here: OpenHere):
        broker = open_here(REQUEST_TIMEOUT=SHORT)
        [half] = halves(broker)
        port.freeze(END)

        [outcome] = broker.end([half], COMMIT)
        port.thaw()

        assert outcome.status is SendStatus.UNSURE
        assert len(port.asked(END)) == 1
        assert [one.half_id for one in port.log.ends] == [half.half_id]  # done later, with nobody to hear of it

    def test_is_missing_where_it_did_not_leave(self, port: PortStub, open_here: OpenHere):
        [half] = halves(open_here())
        newcomer = open_here(NAME_SERVERS=[], BROKER_ADDRESSES={"broker-a": port.address})
        port.stop()

        [outcome] = newcomer.end([half], COMMIT)

        assert (outcome.status, outcome.ended) == (SendStatus.UNAVAILABLE, None)
        assert "was not sent" in outcome.reason


class TestWithin:
    """No end leaves later than it may: whoever takes the half message over then ends it."""

    def test_leaves_the_rest_alone_when_the_time_is_over(self, port: PortStub, open_here: OpenHere):
        clocks = {"clock": lambda: float(len(port.asked(END)))}  # each takes a second
        broker = open_here(clocks=clocks, IN_FLIGHT=1)
        refs = halves(broker, 5)

        outcomes = broker.end(refs, COMMIT, within=timedelta(seconds=2))

        assert [one.status for one in outcomes] == [SendStatus.ACCEPTED] * 2 + [SendStatus.UNAVAILABLE] * 3
        assert {one.half_id for one in port.log.ends} == {one.half_id for one in refs[:2]}

    def test_counts_the_time_that_a_connection_takes(
        self, port: PortStub, open_here: OpenHere, monkeypatch: pytest.MonkeyPatch, seconds: list[float]
    ):
        [half] = halves(open_here())
        address = {"broker-a": port.address}
        newcomer = open_here(clocks={"clock": lambda: seconds[0]}, NAME_SERVERS=[], BROKER_ADDRESSES=address)
        opened = RemotingConnection.open

        async def open_slowly(*args: Any, **options: Any) -> RemotingConnection:
            seconds[0] += 1.5
            return await opened(*args, **options)

        monkeypatch.setattr(RemotingConnection, "open", open_slowly)
        [outcome] = newcomer.end([half], COMMIT, within=timedelta(seconds=1))

        assert outcome.status is SendStatus.UNAVAILABLE
        assert port.asked(END) == []

    @pytest.fixture
    def seconds(self) -> Iterator[list[float]]:
        return [100.0]

    def test_is_no_limit_unless_given(self, port: PortStub, open_here: OpenHere, seconds: list[float]):
        broker = open_here(clocks={"clock": lambda: seconds[0]})
        [half] = halves(broker)
        seconds[0] += 1_000_000

        assert [one.ended for one in broker.end([half], COMMIT)] == [Ended.COMMITTED]
