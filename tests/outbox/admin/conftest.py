"""Operators with more and fewer permissions, and what a page asks of the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from outbox.models import Topic
from tests.factories import BatchFactory, MessageRowFactory

Ask = list[tuple[str, Any]]


@pytest.fixture
def orders(db: None) -> Topic:
    return Topic.objects.get(name="orders")


@pytest.fixture
def operator(db: None) -> Callable[..., Client]:
    """Log a member of the staff in who has those permissions, and no others."""

    def operator(*codenames: str, name: str = "ada") -> Client:
        user = User.objects.create_user(name, password="x", is_staff=True)
        found = Permission.objects.filter(content_type__app_label__startswith="outbox", codename__in=codenames)
        assert set(found.values_list("codename", flat=True)) == set(codenames)
        user.user_permissions.set(found)
        client = Client()
        client.force_login(user)
        return client

    return operator


@pytest.fixture
def message(orders: Topic) -> Callable[..., Any]:
    """Make a message that stands in a batch of its own."""

    def message(*, batch: dict[str, Any] | None = None, **fields: Any) -> Any:
        row = MessageRowFactory(topic=orders, **fields)
        if batch is not None:
            BatchFactory(topic=orders, message_ids=[row.id], **batch)
        return row

    return message


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What the database is asked, over whatever connection: Django's cursors are psycopg's, too."""
    heard: Ask = []
    execute = psycopg.Cursor.execute

    def listen(self: Any, query: Any, params: Any = None, **options: Any) -> Any:
        heard.append((query, params))
        return execute(self, query, params, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", listen)
    return heard
