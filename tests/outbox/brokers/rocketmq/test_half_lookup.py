"""Where half messages stand whose end was not answered. Needs no server, but stubs of ours."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.brokers.base import HalfRef, HalfStatus
from outbox.brokers.options import read_options
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.half_lookup import HalfLookup
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.brokers.rocketmq.places import HalfPlace
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.client import RemotingClient
from outbox.brokers.rocketmq.remoting.frames import StoredMessage
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.outbox.brokers.rocketmq.stub import Stub

VISIBLE, HIDDEN, GONE, UNPROVEN, UNKNOWN = HalfStatus

OFFSET_AT = requests.SEARCH_OFFSET_BY_TIMESTAMP

TOPIC = "transaction"
QUERY, VIEW, PULL = requests.QUERY_MESSAGE, requests.VIEW_MESSAGE, requests.PULL_MESSAGE

LookUp = Callable[..., list[HalfStatus]]


def ref(half: StoredMessage, broker: str = "broker-a", *, place: str | None = None, after: float = 0.1) -> HalfRef:
    """Name a half message, decided a moment after it was stored."""
    decided_at = half.stored_at + timedelta(seconds=after)
    place = str(HalfPlace.of_stored(broker, half)) if place is None else place
    half_id = half.properties["UNIQ_KEY"]
    return HalfRef(TOPIC, half_id, half_id.partition(".")[0], place, decided_at=decided_at)


def begins(port: PortStub) -> set[int]:
    """Since when topics were read, in milliseconds; not the queue of half messages."""
    asked = port.asked(OFFSET_AT)
    return {int(one.fields["timestamp"]) for one in asked if one.fields["topic"] == TOPIC}


def commit(port: PortStub, half: StoredMessage) -> None:
    port.log.end(half.log_offset, half.queue_offset, requests.COMMIT_TYPE)


@pytest.fixture
def client(stub: Stub, port: PortStub) -> Iterator[RocketMQClient]:
    raw = {"ENDPOINTS": stub.endpoints, "NAME_SERVERS": [port.address], "REQUEST_TIMEOUT": timedelta(seconds=2)}
    client = RocketMQClient(read_options(RocketMQOptions, raw))
    yield client
    client.close()


@pytest.fixture
def look_up(client: RocketMQClient) -> LookUp:
    """Look half messages up as if their broker had answered for long."""
    return lambda *halves: HalfLookup(client, settle_seconds=0).look_up(halves)


@pytest.fixture
def half(port: PortStub) -> StoredMessage:
    return port.log.append_half(TOPIC, "m.1")


@pytest.fixture
def other(stub: Stub, port: PortStub) -> Iterator[PortStub]:
    other = PortStub("broker-b")
    port.brokers.append(other)
    stub.brokers.append(stub)
    yield other
    other.stop()


class TestByKey:
    def test_is_visible_where_its_message_is_found(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        commit(port, half)

        assert look_up(ref(half)) == [VISIBLE]

    def test_is_hidden_where_only_itself_is_found(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        assert look_up(ref(half)) == [HIDDEN]
        assert port.asked(PULL) == []

    def test_answers_for_each_in_order(self, port: PortStub, look_up: LookUp):
        first, second, third = (port.log.append_half(TOPIC, f"m{number}.1") for number in range(3))
        commit(port, second)

        assert look_up(ref(third), ref(second), ref(first)) == [HIDDEN, VISIBLE, HIDDEN]

    @pytest.mark.parametrize("place", [None, ""], ids=["place", "no place"])
    def test_is_not_hidden_by_one_that_was_stored_again(
        self, port: PortStub, half: StoredMessage, look_up: LookUp, place: str | None
    ):
        """Its message was indexed before that one, and is forgotten with the first half message."""
        commit(port, half)
        port.log.forget_index()
        port.log.now = lambda: datetime.now(UTC) + timedelta(seconds=6)
        port.log.append_again(half)

        assert look_up(ref(half, place=place)) == [VISIBLE]

    def test_is_hidden_without_a_place_where_it_was_stored_with_the_decision(
        self, port: PortStub, half: StoredMessage, look_up: LookUp
    ):
        port.log.now = lambda: datetime.now(UTC) + timedelta(seconds=6)
        port.log.append_again(half)

        assert look_up(ref(half, place="", after=-1)) == [HIDDEN]
        assert port.asked(PULL) == []

    def test_tells_a_half_message_from_another_of_the_same_message(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        commit(port, port.log.append_half(TOPIC, "m.2"))
        port.log.append(TOPIC, {"UNIQ_KEY": "another", "KEYS": "another m.1"})  # whose own key is that id

        assert look_up(ref(half)) == [HIDDEN]


class TestByReading:
    @pytest.fixture(autouse=True)
    def full(self, port: PortStub) -> None:
        """Messages of others, more than one pull returns."""
        for number in range(200):
            port.log.append(TOPIC, {"UNIQ_KEY": f"other{number}", "KEYS": f"other{number}"})

    @pytest.mark.parametrize("more", [0, 1], ids=["first queue", "second queue"])
    def test_is_visible_where_its_queue_has_it(self, port: PortStub, half: StoredMessage, look_up: LookUp, more: int):
        for number in range(more):
            port.log.append(TOPIC, {"UNIQ_KEY": f"one-more{number}"})
        commit(port, half)
        port.log.forget_index()

        assert look_up(ref(half)) == [VISIBLE]

    def test_is_hidden_where_it_lies_at_its_place(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        port.log.forget_index()

        assert look_up(ref(half)) == [HIDDEN]

    def test_is_not_hidden_by_another_at_its_place(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        port.log.lose(half)

        assert look_up(ref(half)) == [GONE]
        assert len(port.asked(VIEW)) == 1

    def test_is_hidden_where_the_queue_of_half_messages_has_it_elsewhere(
        self, port: PortStub, half: StoredMessage, look_up: LookUp, client: RocketMQClient
    ):
        again = port.log.append_again(half)
        port.log.lose(half)
        port.log.forget_index()
        unanswered = HalfLookup(client, settle_seconds=0)

        [standing] = unanswered.look_up([ref(half, place="")])

        assert standing is HIDDEN
        assert unanswered.places == {"m.1": HalfPlace("broker-a", again.log_offset, again.queue_offset)}

    def test_is_gone_where_neither_is_there(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        named = ref(half)
        del port.log.messages[half.log_offset]

        assert look_up(named) == [GONE]

    def test_proves_nothing_where_its_place_is_not_known_since_another_broker_may_have_it(
        self, port: PortStub, half: StoredMessage, look_up: LookUp
    ):
        named = ref(half, place="")
        port.log.lose(half)

        assert look_up(named) == [UNPROVEN]

    def test_proves_nothing_where_the_broker_does_not_keep_what_is_as_old(
        self, port: PortStub, half: StoredMessage, look_up: LookUp
    ):
        named = ref(half)
        port.log.lose(half)
        port.earliest_ms = round(named.decided_at.timestamp() * 1000) + 1000

        assert look_up(named) == [UNPROVEN]

    def test_proves_nothing_where_the_broker_has_nothing(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        port.log.lose(half)
        port.earliest_ms = 0

        assert look_up(ref(half)) == [UNPROVEN]

    def test_proves_nothing_where_it_was_never_decided(self, port: PortStub, look_up: LookUp):
        assert look_up(HalfRef(TOPIC, "m.1", "m")) == [UNPROVEN]

    def test_begins_where_the_half_message_lies(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        port.log.forget_index()

        look_up(ref(half))

        [begin] = begins(port)
        assert begin == pytest.approx((half.stored_at - timedelta(seconds=5)).timestamp() * 1000, abs=2)

    def test_begins_two_minutes_before_the_decision_where_it_lies_nowhere(
        self, port: PortStub, half: StoredMessage, look_up: LookUp
    ):
        named = ref(half)
        port.log.lose(half)

        look_up(named)

        assert begins(port) == {int((named.decided_at - timedelta(minutes=2)).timestamp() * 1000)}

    def test_reads_a_topic_once_for_all(self, port: PortStub, look_up: LookUp):
        many = [port.log.append_half(TOPIC, f"m{number}.1") for number in range(10)]
        commit(port, many[3])
        port.log.forget_index()

        standings = look_up(*map(ref, many))

        assert standings == [VISIBLE if number == 3 else HIDDEN for number in range(10)]
        assert len(port.asked(OFFSET_AT)) == 2  # of each queue

    def test_goes_on_with_the_next_look_where_much_is_to_be_read(
        self, port: PortStub, half: StoredMessage, client: RocketMQClient
    ):
        for number in range(50):
            port.log.append(TOPIC, {"UNIQ_KEY": f"other.{number}"})
        commit(port, half)
        port.log.forget_index()
        unanswered = HalfLookup(client, settle_seconds=0, max_read=100)

        standings = [unanswered.look_up([ref(half)])[0] for _ in range(4)]

        assert standings[0] is UNKNOWN
        assert standings[standings.index(VISIBLE) - 1] is UNKNOWN
        assert HIDDEN not in standings

    def test_knows_nothing_where_the_route_has_no_queue_of_its_broker(
        self, port: PortStub, half: StoredMessage, client: RocketMQClient, monkeypatch: pytest.MonkeyPatch
    ):
        async def have_none(topic: str) -> list[Any]:
            return []

        monkeypatch.setattr(client.routes, "of", have_none)
        port.log.forget_index()

        assert HalfLookup(client, settle_seconds=0).look_up([ref(half)]) == [UNKNOWN]


class TestUnknown:
    def test_is_what_a_broker_says_that_has_just_come_back(self, port: PortStub, half: StoredMessage, client: RocketMQClient):
        """What waited at its port while it was frozen or away is done about now."""
        seconds = [0.0]
        client.remoting = RemotingClient(client.options, clock=lambda: seconds[0])
        unanswered = HalfLookup(client)
        port.close_at(QUERY, does=False, times=1)

        standings = [unanswered.look_up([ref(half)])]
        for wait in (0, 9.9, 0.2):
            seconds[0] += wait
            standings.append(unanswered.look_up([ref(half)]))

        assert standings == [[UNKNOWN], [UNKNOWN], [UNKNOWN], [HIDDEN]]

    def test_is_not_said_of_what_is_visible_already(self, port: PortStub, half: StoredMessage, client: RocketMQClient):
        commit(port, half)

        assert HalfLookup(client).look_up([ref(half)]) == [VISIBLE]

    @pytest.mark.parametrize("code", [QUERY, VIEW, PULL, OFFSET_AT, requests.GET_MAX_OFFSET, requests.GET_RUNTIME_INFO])
    @pytest.mark.parametrize("trouble", ["busy", "no answer"])
    def test_is_what_cannot_be_asked(self, port: PortStub, half: StoredMessage, look_up: LookUp, code: int, trouble: str):
        port.log.lose(half)  # so that all of these are asked
        if trouble == "busy":
            port.say(code, 2, "[TIMEOUT_CLEAN_QUEUE]")
        else:
            port.close_at(code, does=False)

        assert look_up(ref(half)) == [UNKNOWN]

    def test_is_where_a_broker_is_away(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        look_up(ref(half))
        port.stop()

        assert look_up(ref(half)) == [UNKNOWN]

    def test_is_where_no_name_server_was_ever_there(self, port: PortStub, half: StoredMessage, look_up: LookUp):
        port.stop()

        assert look_up(ref(half)) == [UNKNOWN]

    def test_is_where_its_broker_serves_the_topic_no_more(self, half: StoredMessage, look_up: LookUp):
        assert look_up(ref(half, "broker-z")) == [UNKNOWN]


class TestSeveralBrokers:
    def test_are_each_asked_about_their_own(self, port: PortStub, other: PortStub, half: StoredMessage, look_up: LookUp):
        elsewhere = other.log.append_half(TOPIC, "m2.1")
        commit(other, elsewhere)

        assert look_up(ref(half), ref(elsewhere, "broker-b")) == [HIDDEN, VISIBLE]

    @pytest.mark.parametrize("is_committed", [False, True])
    def test_are_all_asked_about_one_whose_place_is_not_known(self, other: PortStub, look_up: LookUp, is_committed: bool):
        elsewhere = other.log.append_half(TOPIC, "m2.1")
        if is_committed:
            commit(other, elsewhere)

        assert look_up(ref(elsewhere, place="")) == [VISIBLE if is_committed else HIDDEN]

    def test_prove_nothing_while_one_of_them_is_away(self, other: PortStub, half: StoredMessage, look_up: LookUp, port: PortStub):
        named = ref(half, place="")
        port.log.lose(half)
        other.stop()

        assert look_up(named) == [UNKNOWN]

    def test_are_no_reason_to_doubt_each_other(self, other: PortStub, half: StoredMessage, look_up: LookUp):
        elsewhere = ref(other.log.append_half(TOPIC, "m2.1"), "broker-b")
        other.stop()

        assert look_up(ref(half), elsewhere) == [HIDDEN, UNKNOWN]

    def test_are_read_where_the_index_is_lost(self, other: PortStub, look_up: LookUp):
        elsewhere = other.log.append_half(TOPIC, "m2.1")
        commit(other, elsewhere)
        other.log.forget_index()

        assert look_up(ref(elsewhere, "broker-b")) == [VISIBLE]
