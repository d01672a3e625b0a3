"""Fixtures for tests of the outbox and its apps: brokers, alerts, operators, queries of a page, system checks."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.core.checks import CheckMessage, run_checks
from django.dispatch import Signal
from django.test import Client

from outbox import message, signals
from outbox.consuming import register
from outbox.models import Topic

Ask = list[tuple[str, Any]]


class Clock:
    """The broker's clock, which the test advances."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def forward(self, time: timedelta) -> None:
        self.now += time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory_brokers(settings: Any, clock: Clock) -> None:
    """Two memory brokers by their names in settings, with a clock that the test advances."""
    memory = "outbox.brokers.memory.MemoryBroker"
    settings.OUTBOX = {
        "BROKERS": {
            "default": {"BACKEND": memory, "OPTIONS": {"NAME": uuid.uuid4().hex, "CLOCK": clock}},
            "second": {"BACKEND": memory, "OPTIONS": {"NAME": uuid.uuid4().hex, "CLOCK": clock}},
        },
        "TOPICS": {
            "orders": {"TYPE": "normal"},
            "plain": {"TYPE": "normal"},
            "ordered": {"TYPE": "fifo"},
            "elsewhere": {"BROKER": "second", "TYPE": "normal"},
        },
    }


@pytest.fixture
def no_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "registered", {})


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event for which the code under test waits; it is set after the test."""
    gate = threading.Event()
    yield gate
    gate.set()


@contextmanager
def heard_of(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    """Collect the arguments with which a signal is sent in the block."""
    heard: list[dict[str, Any]] = []

    def hear(**said: Any) -> None:
        heard.append(said)

    signal.connect(hear)
    yield heard
    signal.disconnect(hear)


@pytest.fixture
def alerts() -> Iterator[list[dict[str, Any]]]:
    """The alerts sent."""
    with heard_of(signals.alert) as heard:
        yield heard


@pytest.fixture
def only_the_shops_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the message types of the shop; other tests' modules define some that the system checks complain about."""
    shops = {name: one for name, one in message.registered.items() if not one.__module__.startswith("tests.")}
    monkeypatch.setattr(message, "registered", shops)


@pytest.fixture
def own_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's message types, consumers, check-back functions and what goes half first, not the shop's."""
    for module in ("message", "consuming.register", "check_backs.register", "half_first.build"):
        monkeypatch.setattr(import_module(f"outbox.{module}"), "registered", {})


@pytest.fixture
def found() -> Callable[..., list[CheckMessage]]:
    """Return a function that runs the system checks of the outbox and its apps."""

    def found(**options: Any) -> list[CheckMessage]:
        return [problem for problem in run_checks(tags=["outbox"], **options) if str(problem.id).startswith("outbox.")]

    return found


@pytest.fixture
def orders(db: None) -> Topic:
    return Topic.objects.get(name="orders")


@pytest.fixture
def operator(db: None) -> Callable[..., Client]:
    """Log a member of the staff in who has those permissions of the outbox and its apps, and no others."""

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
def asked(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """The statements sent over any connection: Django's cursors are psycopg's, too."""
    heard: Ask = []
    execute = psycopg.Cursor.execute

    def listen(self: Any, query: Any, params: Any = None, **options: Any) -> Any:
        heard.append((query, params))
        return execute(self, query, params, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", listen)
    return heard
