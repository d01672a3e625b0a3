"""A broker that offers the least refuses the rest, and says which flag to look at."""

import pytest

from outbox.brokers.base import Broker
from outbox.errors import UnsupportedByBroker
from outbox.message import COMMIT

Least = type("Least", (Broker,), dict.fromkeys(Broker.__abstractmethods__, lambda *args, **kwargs: []))


class TestBroker:
    @pytest.mark.parametrize(
        ("call", "arguments", "flag"),
        [
            ("send_halves", [[]], "supports_half_messages"),
            ("end", [[], COMMIT], "supports_half_messages"),
            ("check_halves", [lambda half: COMMIT], "needs_check_loop"),
            ("listen", [lambda half: COMMIT], "asks_producers"),
            ("dead_letters", ["group"], "supports_replay"),
            ("replay", ["group", []], "supports_replay"),
        ],
    )
    def test_refuses_what_it_does_not_offer(self, call: str, arguments: list[object], flag: str):
        broker = Least("default", {}, [])

        with pytest.raises(UnsupportedByBroker, match=flag):
            getattr(broker, call)(*arguments)

        assert not getattr(broker, flag)
