"""The number of statements in a round, which is the same for hundreds of messages as for a few."""

import re
import tempfile
from collections.abc import Callable

import pytest

from outbox import database
from outbox.relay.rounds import Relay
from tests.factories import TicketFactory

pytestmark = pytest.mark.django_db

ONCE = 5  # re-claim, claim, is an ordered ticket waiting, the messages, the mark


def statements_of(work: Callable[[], object]) -> int:
    """Count the statements sent in the block, from libpq's trace."""
    connection = database.raw("default").pgconn
    with tempfile.TemporaryFile("w+") as file:
        connection.trace(file.fileno())
        try:
            work()
        finally:
            connection.untrace()
        file.seek(0)
        return len(re.findall(r"^[^\t\n]*\tF\t\d+\t(?:Execute|Query)\b", file.read(), re.MULTILINE))


class TestARound:
    @pytest.mark.parametrize(("topics", "each"), [(1, 2), (1, 60), (4, 40)])
    @pytest.mark.parametrize(("kind", "decisions"), [("normal", 0), ("transaction", 1)], ids=["one phase", "two phases"])
    def test_is_the_same_few_statements_and_a_decision_for_each_batch_of_halves(
        self, relay: Relay, make_topic, kind, decisions, topics, each
    ):
        for _ in range(topics):
            TicketFactory.create_batch(each, topic=make_topic(kind))

        statements = statements_of(relay.step)

        assert relay.total.sent == topics * each
        assert statements <= ONCE + decisions * topics
