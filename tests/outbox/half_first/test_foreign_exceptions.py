"""An exception that is not the database's, at any place of a transaction that goes half first: what is committed is shown."""

from contextlib import suppress

import pytest
from django.contrib.auth.models import Group
from django.db import transaction

from outbox import transactional
from outbox.errors import NotOutermost
from tests.foreign_exceptions import Place, planted
from tests.outbox.half_first.orders import GroupMade, ask, make_group, shown, shown_keys


@transactional(half_first=lambda number: GroupMade(group_id=number))
def make(number, message):
    return Group.objects.create(pk=message.group_id, name=str(message.group_id))


@pytest.mark.parametrize("place", Place)
def test_at_every_call_loses_and_invents_nothing(broker, relay, place):
    answered = []
    tried = 0

    def attempt():
        nonlocal tried
        tried += 1
        with suppress(Exception):
            answered.append(str(make(tried).pk))

    attempt()  # finds the topic
    with planted() as bomb:
        for nth in bomb.numbers(at_least=6):
            bomb.arm(nth, place)
            attempt()
            attempt()  # on the connection as it was left

    while broker.check_halves(ask):
        pass
    relay.sweep()
    committed = {group.name for group in Group.objects.all()}
    assert set(answered) <= committed
    assert len(answered) >= tried // 2
    assert sorted(shown_keys(broker)) == sorted(committed)


def test_is_not_refused_for_ever_where_autocommit_was_left_off(broker):
    transaction.set_autocommit(False)

    with pytest.raises(NotOutermost):
        make_group()
    make_group()

    assert len(shown(broker)) == Group.objects.count() == 1
