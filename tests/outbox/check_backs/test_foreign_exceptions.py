"""An exception that is not the database's, at any place of an answer: ROLLBACK is said only of what can never commit."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from outbox.check_backs.answer import answer
from outbox.message import ROLLBACK, Half, Token
from outbox.models import State
from tests.factories import BatchFactory, TopicFactory, message_id
from tests.foreign_exceptions import Place, planted
from tests.outbox.check_backs.halves import half_of, source_of

pytestmark = pytest.mark.django_db(transaction=True)

PUBLISH = "INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, %s, '')"
DECIDE = f"UPDATE outbox_batch SET state = {State.PREPARED} WHERE id = %s AND attempt = %s AND state = {State.CLAIMED}"


def is_the_checks(connection: psycopg.Connection) -> bool:
    return connection.info.get_parameters().get("application_name") == "outbox check-back"


@pytest.mark.parametrize("place", Place)
def test_of_a_message_that_went_half_first(other_connection, place):
    topic, source, rolled_back = TopicFactory(type="transaction"), source_of(), 0
    with planted(is_the_checks) as bomb:
        for nth in bomb.numbers(at_least=6):
            new = message_id()
            bomb.arm(nth, place)
            given = answer(Half(topic.name, str(new), "h", str(Token(source, 0, 1, 1))), asked_by="test")
            bomb.disarm()
            try:
                other_connection.execute(PUBLISH, [new, topic.id])
            except psycopg.errors.UniqueViolation:
                rolled_back += 1
            else:
                assert given.resolution is not ROLLBACK
    assert rolled_back


@pytest.mark.parametrize("place", Place)
def test_of_a_batch_whose_lease_is_over(other_connection, place):
    rolled_back = 0
    with planted(is_the_checks) as bomb:
        for nth in bomb.numbers(at_least=6):
            batch = BatchFactory(state=State.CLAIMED, lease_until=datetime.now(UTC) - timedelta(seconds=1))
            half = half_of(batch)
            bomb.arm(nth, place)
            given = answer(half, asked_by="test")
            bomb.disarm()
            if other_connection.execute(DECIDE, [batch.id, batch.attempt]).rowcount:
                assert given.resolution is not ROLLBACK
            else:
                rolled_back += 1
    assert rolled_back
