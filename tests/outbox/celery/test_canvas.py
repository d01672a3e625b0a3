"""Chains, groups and chords in a transaction."""

from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import _chain as Chain
from django.db import transaction
from kombu.exceptions import EncodeError

from outbox.celery import CeleryBroker, send_in_transaction
from outbox.errors import InvalidMessage
from tests.outbox.celery.app import add
from tests.outbox.celery.conftest import stored, take, through_the_outbox

pytestmark = pytest.mark.django_db


class TestACanvas:
    def test_sends_a_chain_as_one_message_which_carries_the_rest(self, app: Celery, broker: CeleryBroker):
        with transaction.atomic():
            result = send_in_transaction(chain(add.s(1, 2), add.s(3), add.s(4)))
        through_the_outbox(broker)

        [message] = take(app)
        args, _, rest = message.payload
        assert args == [1, 2]
        assert [one["args"] for one in rest["chain"]] == [[4], [3]]
        assert rest["chain"][0]["options"]["task_id"] == result.id
        assert result.parent.parent.id == message.headers["id"]

    def test_gives_a_chain_the_links_and_options_of_its_own(self, app: Celery, broker: CeleryBroker):
        signature = chain(add.s(1, 2), add.s(3)).set(link=add.s(5), link_error=add.si(6, 6), queue="routed")
        signature.apply_async()
        [expected] = take(app, "routed")

        with transaction.atomic():
            send_in_transaction(signature)
        through_the_outbox(broker)

        [message] = take(app, "routed")
        for one in (message, expected):
            for step in one.payload[2]["chain"]:
                for name in ("task_id", "root_id", "reply_to"):
                    step["options"].pop(name, None)
        assert message.payload == expected.payload

    def test_sends_a_group_as_a_message_for_each_task(self, app: Celery, broker: CeleryBroker):
        with transaction.atomic():
            result = send_in_transaction(group(add.s(1, 1), chain(add.s(2, 2), add.s(3)), group(add.s(4, 4))))
        through_the_outbox(broker)

        messages = take(app)
        assert sorted(one.payload[0][0] for one in messages) == [1, 2, 4]
        by_first = {one.payload[0][0]: one for one in messages}
        assert by_first[1].headers["group"] == by_first[4].headers["group"] == result.id
        assert [by_first[1].headers["group_index"], by_first[4].headers["group_index"]] == [0, 2]
        [last] = by_first[2].payload[2]["chain"]
        assert (last["options"]["group_id"], last["options"]["group_index"]) == (result.id, 1)
        assert [one.id for one in result] == [by_first[1].headers["id"], last["options"]["task_id"], by_first[4].headers["id"]]

    def test_gives_a_groups_options_to_its_tasks(self, app: Celery, broker: CeleryBroker):
        with transaction.atomic():
            send_in_transaction(group(add.s(1, 1), add.s(2, 2)).set(queue="routed"))
        through_the_outbox(broker)

        assert len(take(app, "routed")) == 2

    def test_writes_all_of_a_group_or_nothing(self):
        with transaction.atomic(), pytest.raises(EncodeError):
            send_in_transaction(group(add.s(1, 1), add.s(object(), 2)))

        assert stored() == []

    def test_sends_chunks_as_a_group(self, app: Celery, broker: CeleryBroker):
        with transaction.atomic():
            send_in_transaction(add.chunks([(1, 1), (2, 2), (3, 3)], 2))
        through_the_outbox(broker)

        assert [one.headers["task"] for one in take(app)] == ["celery.starmap"] * 2

    @pytest.mark.parametrize(
        "signature",
        [chord([add.s(1, 1)], add.s()), chain(group(add.s(1, 1), add.s(2, 2)), add.s(3))],
        ids=["chord", "a chain that begins with one"],
    )
    def test_refuses_what_begins_with_a_chord(self, signature: Any):
        with transaction.atomic(), pytest.raises(InvalidMessage, match="begins with a chord"):
            send_in_transaction(signature)

    def test_keeps_a_chord_behind_a_first_task(self, app: Celery, broker: CeleryBroker):
        with transaction.atomic():
            send_in_transaction(chain(add.s(1, 1), group(add.s(2), add.s(3)), add.s(4)))
        through_the_outbox(broker)

        [message] = take(app)
        assert [one["task"] for one in message.payload[2]["chain"]] == ["celery.chord"]

    @pytest.mark.parametrize("kind", [group, Chain])
    def test_refuses_one_without_tasks(self, app: Celery, kind: Any):
        signature = kind([], app=app)

        with transaction.atomic(), pytest.raises(InvalidMessage, match="has no task"):
            send_in_transaction(signature)

    def test_refuses_a_link_of_a_group(self):
        signature = group(add.s(1, 1), add.s(2, 2))
        signature.options["link"] = [add.s(3)]

        with transaction.atomic(), pytest.raises(InvalidMessage, match="Link each of its tasks"):
            send_in_transaction(signature)
