"""The testing kit for unittest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.testing.kit import Outbox

if TYPE_CHECKING:
    from unittest import TestCase as Base
else:
    Base = object


class OutboxTestMixin(Base):
    """
    Mixin for `TestCase` and `TransactionTestCase` that provides the outbox as `self.outbox`::

        class OrderTests(OutboxTestMixin, TestCase):
            def test_tells_the_others(self):
                self.client.post("/orders/")
                self.outbox.assert_published(OrderPlaced)
    """

    _outbox: Outbox | None = None

    def setUp(self) -> None:
        super().setUp()
        self._outbox = self.enterContext(Outbox())

    @property
    def outbox(self) -> Outbox:
        """The testing kit of this test."""
        if self._outbox is None:
            raise AssertionError(f"{type(self).__name__}.setUp() must call super().setUp() before it uses self.outbox.")
        return self._outbox
