"""What is known of routes, and what goes on when nobody can be asked. Needs no server."""

import asyncio
from typing import Any

import grpc
import pytest

from outbox.brokers.rocketmq.endpoints import Queue
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.routes import Routes
from outbox.brokers.rocketmq.stubs import Code, definition, service

AWAY = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "failed to connect")
NO_TOPIC = StatusError(definition.Status(code=Code.TOPIC_NOT_FOUND))


class Server:
    """Answers in turn, the last answer again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.now = 100.0

    async def ask(self, topic: str) -> list[Queue]:
        self.asked += 1
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def routes(self) -> Routes:
        return Routes(self.ask, clock=lambda: self.now)

    def want(self, *steps: float | tuple[str, ...]) -> list[Any]:
        """Want the route, and again after each step: seconds that pass, or the arguments of `invalidate`."""

        async def want() -> list[Any]:
            routes = self.routes()
            found = [await routes.of("orders")]
            for step in steps:
                if isinstance(step, tuple):
                    routes.invalidate(*step)
                else:
                    self.now += step
                found.append(await routes.of("orders"))
            return found

        return asyncio.run(want())


class TestOf:
    def test_asks_once_for_all_who_want_it_at_once(self):
        server = Server(["queue"])

        async def want() -> list[Any]:
            routes = server.routes()
            return await asyncio.gather(*[routes.of("orders") for _ in range(32)])

        assert asyncio.run(want()) == [["queue"]] * 32
        assert server.asked == 1

    def test_remembers_for_a_while(self):
        assert Server(["old"], ["new"]).want(0, 31) == [["old"], ["old"], ["new"]]

    def test_asks_again_when_in_doubt(self):
        assert Server(["old"], ["new"]).want(("orders",)) == [["old"], ["new"]]

    def test_goes_on_with_what_was_known_while_nobody_can_be_asked(self):
        server = Server(["old"], AWAY)

        assert server.want((), 0) == [["old"]] * 3
        assert server.asked == 2  # and is left in peace for a moment

    def test_goes_on_where_a_topic_is_missing_since_its_brokers_may_be_away(self):
        assert Server(["old"], NO_TOPIC).want(300) == [["old"]] * 2

    def test_believes_that_a_topic_is_gone_after_a_while(self):
        with pytest.raises(StatusError):
            Server(["old"], NO_TOPIC).want(601)

    def test_tells_a_topic_that_was_there_from_one_that_never_was(self):
        server = Server(["old"])
        routes = server.routes()
        asyncio.run(routes.of("orders"))

        found = routes.was_seen("orders"), routes.was_seen("ordres")
        server.now += 601

        assert found == (True, False)
        assert not routes.was_seen("orders")

    def test_knows_nothing_where_nothing_was_known(self):
        with pytest.raises(grpc.aio.AioRpcError):
            Server(AWAY).want()


class TestQueues:
    def test_stand_in_the_same_order_at_every_answer(self):
        queues = [
            definition.MessageQueue(id=number, broker=definition.Broker(name=name))
            for name, number in (("b", 1), ("a", 1), ("b", 0), ("a", 0))
        ]

        found = Queue.all_of(service.QueryRouteResponse(message_queues=queues))

        assert [(queue.proto.broker.name, queue.proto.id) for queue in found] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
