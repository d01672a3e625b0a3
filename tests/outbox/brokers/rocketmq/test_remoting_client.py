"""Which brokers there are, and a connection to each. Needs no server, but stubs of ours."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox.brokers.options import read_options
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.client import RemotingClient
from outbox.brokers.rocketmq.remoting.connection import NoAnswer, NotConnected, RemotingConnection
from outbox.brokers.rocketmq.remoting.frames import Request
from tests.clock import Clock
from tests.outbox.brokers.rocketmq.certificates import make_certificate
from tests.outbox.brokers.rocketmq.port_stub import PortStub

INFO = Request(requests.GET_RUNTIME_INFO)


@pytest.fixture
def other(port: PortStub) -> Iterator[PortStub]:
    other = PortStub("broker-b")
    port.brokers.append(other)
    yield other
    other.stop()


def with_remoting(act: Callable[[RemotingClient], Awaitable[Any]], clock: Clock | None = None, **options: Any) -> Any:
    """Act, and close what was opened."""

    async def run() -> Any:
        remoting = RemotingClient(read_options(RocketMQOptions, {"ENDPOINTS": "proxy:8081", **options}), clock or time.monotonic)
        try:
            return await act(remoting)
        finally:
            remoting.close()

    return asyncio.run(run())


def addresses(**options: Any) -> dict[str, str]:
    return with_remoting(lambda remoting: remoting.addresses("orders"), **options)


class TestAddresses:
    def test_are_those_that_a_name_server_says(self, port: PortStub, other: PortStub):
        found = addresses(NAME_SERVERS=[port.address])

        assert found == {"broker-a": port.address, "broker-b": other.address}

    def test_are_those_of_settings_by_name(self, port: PortStub, other: PortStub):
        found = addresses(NAME_SERVERS=[port.address], BROKER_ADDRESSES={"broker-b": "outside:1", "broker-c": "other:1"})

        assert found == {"broker-a": port.address, "broker-b": "outside:1"}

    def test_are_those_of_settings_alone_without_a_name_server(self):
        assert addresses(BROKER_ADDRESSES={"broker-a": "host:1"}) == {"broker-a": "host:1"}

    def test_are_none_where_the_topic_is_not(self, port: PortStub):
        port.say(requests.ROUTE_OF_TOPIC, requests.NO_SUCH_TOPIC, "No topic route info")

        assert addresses(NAME_SERVERS=[port.address]) == {}

    def test_come_from_the_next_name_server_where_one_is_away(self, port: PortStub):
        assert addresses(NAME_SERVERS=["127.0.0.1:1", port.address]) == {"broker-a": port.address}

    def test_come_from_the_next_name_server_where_one_has_just_started_and_knows_nobody(self, port: PortStub):
        started = PortStub()
        started.say(requests.ROUTE_OF_TOPIC, requests.NO_SUCH_TOPIC, "No topic route info")

        assert addresses(NAME_SERVERS=[started.address, port.address]) == {"broker-a": port.address}
        started.stop()

    def test_of_the_cluster_are_asked_of_each_name_server_though_their_order_changes_meanwhile(self, port: PortStub):
        started = PortStub()
        started.say(requests.ROUTE_OF_TOPIC, requests.NO_SUCH_TOPIC, "No topic route info")

        async def act(remoting: RemotingClient) -> None:
            ask = remoting.ask

            async def ask_late(address: str, request: Request) -> Any:
                if request.code == requests.GET_CLUSTER_INFO and address == started.address:
                    await remoting.addresses("orders")  # another caller's question, whose answer comes first
                return await ask(address, request)

            remoting.ask = ask_late  # type: ignore[method-assign]
            await remoting.has_brokers()

        with_remoting(act, NAME_SERVERS=[started.address, port.address])
        started.stop()

        asked = [[request.code for request in stub.requests].count(requests.GET_CLUSTER_INFO) for stub in (started, port)]
        assert asked == [1, 1]

    def test_go_on_while_no_name_server_answers(self, port: PortStub, clock: Clock):
        async def act(remoting: RemotingClient) -> list[dict[str, str]]:
            found = [await remoting.addresses("orders")]
            port.say(requests.ROUTE_OF_TOPIC, 1, "not now")
            clock.now += 31
            found.append(await remoting.addresses("orders"))
            remoting.invalidate("orders")
            return [*found, await remoting.addresses("orders")]

        assert with_remoting(act, clock, NAME_SERVERS=[port.address]) == [{"broker-a": port.address}] * 3

    def test_go_on_while_a_broker_is_away_and_not_named(self, port: PortStub, other: PortStub, clock: Clock):
        """What it holds is not gone for that."""

        async def act(remoting: RemotingClient) -> list[dict[str, str]]:
            found = [await remoting.addresses("orders")]
            for brokers in ([port], []):
                port.brokers = brokers
                clock.now += 31
                found.append(await remoting.addresses("orders"))
            return found

        found = with_remoting(act, clock, NAME_SERVERS=[port.address])

        assert found == [{"broker-a": port.address, "broker-b": other.address}] * 3

    def test_are_unknown_where_no_name_server_ever_answered(self, port: PortStub):
        port.stop()

        with pytest.raises(NotConnected, match="No name server returns the route of topic orders"):
            addresses(NAME_SERVERS=[port.address])

    def test_are_asked_for_now_and_then_and_when_in_doubt(self, port: PortStub, clock: Clock):
        async def act(remoting: RemotingClient) -> list[int]:
            counts = []
            for step in (
                lambda: None,
                lambda: None,
                lambda: setattr(clock, "now", clock.now + 31),
                lambda: remoting.invalidate("orders"),
            ):
                step()
                await remoting.addresses("orders")
                counts.append(len(port.asked(requests.ROUTE_OF_TOPIC)))
            return counts

        assert with_remoting(act, clock, NAME_SERVERS=[port.address]) == [1, 1, 2, 3]

    def test_follow_a_broker_that_moved(self, port: PortStub, other: PortStub):
        port.brokers, other.name = [other], "broker-a"
        moved = PortStub()

        async def act(remoting: RemotingClient) -> int:
            await remoting.ask((await remoting.addresses("orders"))["broker-a"], INFO)
            other.stop()
            port.brokers = [moved]
            with pytest.raises(ConnectionError):
                await remoting.ask(other.address, INFO)
            remoting.invalidate("orders")
            return (await remoting.ask((await remoting.addresses("orders"))["broker-a"], INFO)).code

        assert with_remoting(act, NAME_SERVERS=[port.address]) == 0
        assert len(moved.asked(INFO.code)) == 1
        moved.stop()


class TestAsk:
    def test_opens_one_connection_for_all_who_want_it_at_once(self, port: PortStub):
        async def act(remoting: RemotingClient) -> list[int]:
            return [one.code for one in await asyncio.gather(*[remoting.ask(port.address, INFO) for _ in range(50)])]

        assert with_remoting(act) == [0] * 50
        assert port.connected == 1

    def test_waits_once_for_a_host_that_is_silent_however_many_want_it(self, monkeypatch: pytest.MonkeyPatch, clock: Clock):
        attempts = []

        async def wait_in_vain(*_: Any, **options: Any) -> RemotingConnection:
            attempts.append(clock())
            await asyncio.sleep(0)
            raise NotConnected("no answer in time")

        monkeypatch.setattr(RemotingConnection, "open", wait_in_vain)

        async def act(remoting: RemotingClient) -> list[Any]:
            found = await asyncio.gather(*[remoting.ask("broker:10911", INFO) for _ in range(64)], return_exceptions=True)
            found += await asyncio.gather(remoting.ask("broker:10911", INFO), return_exceptions=True)
            clock.now += 1
            return found + await asyncio.gather(remoting.ask("broker:10911", INFO), return_exceptions=True)

        found = with_remoting(act, clock, BROKER_ADDRESSES={"broker-a": "broker:10911"})

        assert {type(one) for one in found} == {NotConnected}
        assert len(attempts) == 2  # for the 65, and a second later

    def test_of_a_name_server_is_that_which_answered_last(self, port: PortStub, clock: Clock):
        async def act(remoting: RemotingClient) -> None:
            await remoting.addresses("orders")
            remoting.invalidate("orders")
            clock.now += 60
            before = len(port.asked(requests.ROUTE_OF_TOPIC))
            await asyncio.gather(*[remoting.addresses("orders") for _ in range(64)])
            assert len(port.asked(requests.ROUTE_OF_TOPIC)) == before + 1  # one asks for all

        with_remoting(act, clock, NAME_SERVERS=["127.0.0.1:1", port.address])

    def test_opens_another_one_when_it_was_lost(self, port: PortStub):
        async def act(remoting: RemotingClient) -> int:
            port.close_at(INFO.code, does=False, times=1)
            with pytest.raises(NoAnswer):
                await remoting.ask(port.address, INFO)
            return (await remoting.ask(port.address, INFO)).code

        assert with_remoting(act) == 0
        assert port.connected == 2

    def test_does_not_take_a_busy_server_for_a_silent_one(self, port: PortStub):
        """Of a busy broker the runtime information takes seconds; all else is answered at once."""
        port.freeze(INFO.code)

        async def act(remoting: RemotingClient) -> int:
            with pytest.raises(NoAnswer):
                await remoting.ask(port.address, INFO)
            return (await remoting.ask(port.address, Request(requests.GET_MAX_OFFSET, {"topic": "orders", "queueId": 0}))).code

        assert with_remoting(act, REQUEST_TIMEOUT="PT0.2S") == 0

    def test_signs_what_is_asked(self, port: PortStub):
        with_remoting(lambda remoting: remoting.ask(port.address, INFO), ACCESS_KEY="me", SECRET_KEY="secret")

        assert [dict(one.fields).keys() for one in port.requests] == [{"AccessKey", "Signature"}]


class TestAnsweringFor:
    def test_counts_from_the_first_answer_behind_the_last_trouble(self, port: PortStub, clock: Clock):
        async def act(remoting: RemotingClient) -> list[int]:
            seconds = []
            for step in (lambda: None, lambda: setattr(clock, "now", clock.now + 20)):
                step()
                await remoting.ask(port.address, INFO)
                seconds.append(round(remoting.answering_for(port.address)))
            port.close_at(INFO.code, does=True, times=1)
            with pytest.raises(NoAnswer):
                await remoting.ask(port.address, INFO)
            seconds.append(round(remoting.answering_for(port.address)))
            await remoting.ask(port.address, INFO)
            clock.now += 7
            return [*seconds, round(remoting.answering_for(port.address))]

        assert with_remoting(act, clock) == [0, 20, 0, 7]


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Path:
        return make_certificate(tmp_path)

    @pytest.fixture
    def safe(self, authority: Path) -> Iterator[PortStub]:
        safe = PortStub(certificate=authority)
        yield safe
        safe.stop()

    def test_is_spoken_with_a_broker_that_the_file_vouches_for(self, safe: PortStub, authority: Path):
        answer = with_remoting(lambda remoting: remoting.ask(safe.address, INFO), BROKER_TLS=True, TLS_CA_FILE=str(authority))

        assert answer.code == 0

    @pytest.mark.parametrize("options", [{"BROKER_TLS": True}, {}], ids=str)
    def test_keeps_requests_from_strangers_and_from_going_in_the_clear(self, safe: PortStub, options: dict[str, bool]):
        with pytest.raises((NotConnected, NoAnswer)):
            with_remoting(lambda remoting: remoting.ask(safe.address, INFO), **options)

        assert safe.requests == []
