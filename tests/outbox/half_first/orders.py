"""What these tests publish half first: that a group of users was made. And how they look at what became of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import Group
from django.db import connection

from outbox import Message, database, transactional
from outbox.brokers.base import Broker, Delivery
from outbox.check_backs.answer import answer
from outbox.embedded.models import EmbeddedHalf, HalfState
from outbox.message import Half, Resolution, Token
from outbox.models import Batch, MessageRow

NEXT_KEY = "SELECT nextval(pg_get_serial_sequence('auth_group', 'id'))"


class GroupMade(Message):
    group_id: int
    name: str = "staff"

    class Meta:
        topic = "orders"
        key = "group_id"


def next_key() -> int:
    with connection.cursor() as cursor:
        cursor.execute(NEXT_KEY)
        return int(cursor.fetchone()[0])


def announce(*args: Any, **kwargs: Any) -> tuple[GroupMade, Group]:
    """Build the message before its row is there."""
    key = next_key()
    return GroupMade(group_id=key), Group(pk=key)


@transactional(half_first=announce)
def make_group(message: GroupMade) -> Group:
    return Group.objects.create(pk=message.group_id, name=message.name)


def shown(broker: Broker) -> list[str]:
    """Return the ids of the messages that a new consumer group is handed, from the first on."""
    return [delivery.message_id for delivery in _delivered(broker)]


def shown_keys(broker: Broker) -> list[str]:
    """Return the keys of the messages that a new consumer group is handed."""
    return [delivery.key for delivery in _delivered(broker)]


def _delivered(broker: Broker) -> list[Delivery]:
    return broker.receive(uuid4().hex, {"orders": None}, limit=100, invisible_for=timedelta(1), wait=timedelta(0))


def stored_half() -> EmbeddedHalf | None:
    """Return the half message as the embedded broker holds it, over a connection of its own; a committed one has left."""
    return EmbeddedHalf.objects.first()


def is_hidden() -> bool:
    half = stored_half()
    return half is not None and half.state == HalfState.UNDECIDED


def is_rolled_back() -> bool:
    half = stored_half()
    return half is not None and half.state == HalfState.ROLLED_BACK


def half_first_token(using: str = "default") -> str:
    row = database.raw(using).execute("SELECT id FROM outbox_source").fetchone()
    assert row is not None
    return str(Token(row[0], 0, 1, 1))


def committed_half() -> Half:
    """Return the half message of the one batch there is, as a broker asks about it."""
    batch = Batch.objects.get()
    assert batch.half_ids is not None
    return Half("orders", str(MessageRow.objects.get().id), batch.half_ids[0], half_first_token())


def ask(half: Half) -> Resolution:
    """Ask as a broker does: over a connection of its own."""
    return answer(half, asked_by="test").resolution
