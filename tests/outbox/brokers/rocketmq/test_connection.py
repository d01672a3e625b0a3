"""One connection with many requests under way. Needs no server, but a stub of ours."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outbox.brokers.rocketmq.options import parse_address
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NoAnswer, NotConnected, RemotingConnection
from outbox.brokers.rocketmq.remoting.frames import Request
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.waiting import wait_until

VIEW, CONFIG, INFO = requests.VIEW_MESSAGE, requests.GET_BROKER_CONFIG, requests.GET_RUNTIME_INFO


def connected(port: PortStub, act: Callable[[RemotingConnection], Awaitable[Any]], *, seconds: float = 10) -> Any:
    """Connect, act and close."""

    async def run() -> Any:
        connection = await RemotingConnection.open(*parse_address(port.address), seconds=seconds)
        try:
            return await act(connection)
        finally:
            connection.close()

    return asyncio.run(run())


async def outcomes(*asked: Awaitable[Any]) -> list[str]:
    """Wait for all; return the names of what was raised, "answer" for an answer."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    return [type(one).__name__ if isinstance(one, BaseException) else "answer" for one in found]


async def until(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(wait_until, condition)


class TestAsk:
    def test_hands_each_its_own_answer_whatever_their_order(self, port: PortStub):
        port.freeze(CONFIG)

        async def act(connection: RemotingConnection) -> list[bytes]:
            late, soon = connection.ask(Request(CONFIG)), connection.ask(Request(INFO))
            early = (await soon).body
            port.thaw()
            return [(await late).body, early]

        late, early = connected(port, act)

        assert b"transactionTimeOut" in late
        assert b"bootTimestamp" in early

    def test_has_many_under_way_at_once(self, port: PortStub):
        halves = [port.log.append_half("orders", f"m{number}.1") for number in range(500)]
        port.freeze(VIEW)

        async def act(connection: RemotingConnection) -> list[str]:
            asked = [connection.ask(requests.view(half.log_offset)) for half in halves]
            await until(lambda: len(port.asked(VIEW)) == 500)
            port.thaw()
            found = [requests.viewed(await one) for one in asked]
            return [one.properties["UNIQ_KEY"] for one in found if one]

        assert connected(port, act) == [f"m{number}.1" for number in range(500)]
        assert port.connected == 1

    def test_puts_an_answer_together_that_comes_in_pieces(self, port: PortStub):
        stored = port.log.append("orders", {"UNIQ_KEY": "m"}, b"x" * 2000)
        port.bytes_at_once = 3

        async def act(connection: RemotingConnection) -> Any:
            return [requests.viewed(await connection.ask(requests.view(stored.log_offset))) for _ in range(2)]

        found = connected(port, act)

        assert [one.body for one in found] == [b"x" * 2000] * 2

    def test_takes_no_request_of_the_brokers_own_for_an_answer(self, port: PortStub):
        port.freeze(CONFIG)

        async def act(connection: RemotingConnection) -> int:
            asked = connection.ask(Request(CONFIG))
            await until(lambda: port.asked(CONFIG))
            port.ask_all(1)  # of the same number
            await connection.ask(Request(INFO))  # what came before it has been read
            assert not asked.done()
            port.thaw()
            return (await asked).code

        assert connected(port, act) == 0


class TestTime:
    def test_is_over_for_all_that_wait_and_ends_the_connection(self, port: PortStub):
        port.freeze(CONFIG)

        async def act(connection: RemotingConnection) -> tuple[list[str], bool]:
            asked = [connection.ask(Request(CONFIG)) for _ in range(3)]
            return await outcomes(*asked), connection.is_open

        assert connected(port, act, seconds=0.2) == (["NoAnswer"] * 3, False)

    def test_counts_from_each_request(self, port: PortStub):
        """What was answered in time takes no time from those behind it."""
        port.freeze(CONFIG, times=1)

        async def act(connection: RemotingConnection) -> list[str]:
            loop = asyncio.get_running_loop()
            began = loop.time()
            for _ in range(3):
                await connection.ask(Request(INFO))
            asked = connection.ask(Request(CONFIG))
            found = await outcomes(asked)
            assert loop.time() - began >= 0.3
            return found

        assert connected(port, act, seconds=0.3) == ["NoAnswer"]

    def test_is_not_over_for_what_is_answered(self, port: PortStub):
        async def act(connection: RemotingConnection) -> list[str]:
            loop = asyncio.get_running_loop()
            until = loop.time() + 1.5  # longer than a request may take
            found: set[str] = set()
            while loop.time() < until:
                found.update(await outcomes(connection.ask(Request(INFO))))
            return sorted(found)

        assert connected(port, act, seconds=1) == ["answer"]


class TestConnection:
    @pytest.mark.parametrize("does", [False, True])
    def test_that_the_other_end_closes_leaves_no_answer(self, port: PortStub, does: bool):
        half = port.log.append_half("orders", "m.1")
        port.close_at(requests.END_TRANSACTION, does=does)
        commit = requests.end("orders", "m.1", half.queue_offset, half.log_offset, requests.COMMIT_TYPE)

        async def act(connection: RemotingConnection) -> list[str]:
            return await outcomes(connection.ask(commit))

        assert connected(port, act) == ["NoAnswer"]
        assert len(port.log.of("orders")) == does

    def test_takes_no_request_once_it_is_closed(self, port: PortStub):
        async def act(connection: RemotingConnection) -> None:
            connection.close()
            with pytest.raises(NotConnected):
                connection.ask(Request(INFO))
            assert not connection.is_open

        connected(port, act)

        assert port.requests == []

    def test_has_no_answer_for_what_waits_when_it_is_closed(self, port: PortStub):
        port.freeze(INFO)

        async def act(connection: RemotingConnection) -> None:
            asked = connection.ask(Request(INFO))
            await until(lambda: port.asked(INFO))
            connection.close()
            with pytest.raises(NoAnswer, match="was closed"):
                await asked

        connected(port, act)

    def test_cannot_be_made_where_nobody_listens(self, port: PortStub):
        port.stop()

        async def act(connection: RemotingConnection) -> None:
            raise AssertionError("connected")

        with pytest.raises(NotConnected, match=port.address):
            connected(port, act)

    def test_to_nobody_is_over_in_time(self):
        async def run() -> None:
            with pytest.raises(NotConnected, match="no answer in time"):
                await RemotingConnection.open("192.0.2.1", 9, seconds=0.0)  # kept for documents: nobody has it

        asyncio.run(run())
