"""An exception that is not the database's, at any place of a transaction: who hears of no error finds all of it committed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group

import outbox
from tests.foreign_exceptions import Place, planted
from tests.outbox.publishing.rows import OrderMade, bodies

pytestmark = pytest.mark.django_db(transaction=True)


def write_and_publish(number: int) -> None:
    Group.objects.create(name=str(number))
    outbox.publish(OrderMade(order_id=number))


def in_a_block(number: int) -> None:
    with outbox.transaction():
        write_and_publish(number)


@outbox.transactional
def in_a_function(number: int) -> None:
    write_and_publish(number)


@outbox.transactional
async def in_a_coroutine(number: int) -> None:
    await Group.objects.acreate(name=str(number))
    await outbox.apublish(OrderMade(order_id=number))


WORK = {"block": in_a_block, "function": in_a_function, "coroutine": async_to_sync(in_a_coroutine)}


def committed() -> tuple[set[int], set[int]]:
    """Return which numbers have their row, and which their message."""
    return {int(group.name) for group in Group.objects.all()}, {body["order_id"] for body in bodies()}


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize(
    "work", [in_a_block, in_a_function, async_to_sync(in_a_coroutine)], ids=["block", "function", "coroutine"]
)
def test_at_every_call_leaves_nothing_out_that_was_answered(work: Callable[[int], None], place: Place):
    answered = set()
    tried = 0

    def attempt() -> None:
        nonlocal tried
        tried += 1
        try:
            work(tried)
        except Exception:
            return
        answered.add(tried)

    in_a_block(0)  # finds the topic
    with planted() as bomb:
        for nth in bomb.numbers(at_least=5):
            bomb.arm(nth, place)
            attempt()
            attempt()  # on the connection as it was left

    rows, messages = committed()
    assert answered <= rows
    assert rows == messages
    assert len(answered) >= tried // 2
