"""The code of docs/how-to/move-here.md runs as it stands, and the code that it replaces is Python."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Group

from outbox.testing import Outbox
from tests.outbox.celery.app import add
from tests.quotes import ROOT, python_blocks

PAGE = "how-to/move-here.md"
TASK, ON_COMMIT, OUTBOX_PATTERN, JAIMINHO = python_blocks(PAGE)
BEFORE = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / PAGE).read_text(), re.DOTALL)

pytestmark = pytest.mark.usefixtures("own_definitions")


class TestTheCodeBefore:
    @pytest.mark.parametrize("block", BEFORE)
    def test_is_python(self, block: str):
        assert compile(block, PAGE, "exec")


class TestTheCodeAfter:
    """A group of Django's stands for an order: its row needs no value."""

    def test_sends_a_task(self, outbox: Outbox):
        task = SimpleNamespace(delay_in_transaction=lambda order: add.delay_in_transaction(order, 1))

        exec(TASK, {"Order": Group, "send_receipt": task})  # noqa: S102

        assert outbox.run_until_idle().sent == 1

    def test_publishes_in_place_of_on_commit(self, outbox: Outbox):
        names: dict[str, Any] = {"Order": Group}

        exec(ON_COMMIT, names)  # noqa: S102

        outbox.assert_published(names["OrderPlaced"], order_id=Group.objects.get().pk)

    def test_publishes_and_handles_in_place_of_django_outbox_pattern(self, outbox: Outbox):
        given: list[int] = []
        names: dict[str, Any] = {"give_points": given.append}
        exec(OUTBOX_PATTERN, names)  # noqa: S102
        order = Group(name="an order")
        order.customer = "Ann"

        names["save_order"](order)
        outbox.run_until_idle()

        assert given == [order.pk]

    def test_calls_the_function_in_place_of_django_jaiminho(self, outbox: Outbox):
        shipped: dict[str, int] = {}
        names: dict[str, Any] = {"Order": Group, "ship": lambda order, idempotency_key: shipped.update({idempotency_key: order})}

        exec(ON_COMMIT, names)  # noqa: S102
        exec(JAIMINHO, names)  # noqa: S102
        outbox.run_until_idle()

        assert list(shipped.values()) == [Group.objects.get().pk]
