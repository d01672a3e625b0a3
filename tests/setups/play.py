"""
Plays the small shop in the set-up that SETUP names, as a program of its own.

    SETUP=plain DATABASE_URL=postgresql://... python -m tests.setups.play [migrate] [check] [shop] [prune]

Acts that are not named are left to another role. Each prints a line; the first that fails ends the program with a traceback.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.setups.settings"

import django
from django.apps import apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import connections
from django.test import AsyncClient, Client

SECONDS = 20  # that a message may need from its commit to its handler


def migrate() -> str:
    """Migrate each database that takes part."""
    for alias in _aliases():
        call_command("migrate", database=alias, verbosity=0)
    return ", ".join(_aliases())


def check() -> str:
    """Run Django's system checks, which find nothing."""
    call_command("check", databases=_aliases(), fail_level="WARNING", stdout=StringIO())
    return "no issues"


def shop() -> str:
    """Place orders while a relay and a consumer run; look at all that an operator has."""
    from tests.setups.shop.consumers import IS_REFUSED

    with _running("outbox_relay"), _running("outbox_consume", "--group", "points", tracebacks=1):
        good, bad = _place_order(points=1), _place_order(points=IS_REFUSED)
        _wait_for("the order's points", lambda: _order(good).points == 11)
        _wait_for("the dead letter", lambda: len(_dead_letters()) == 1)
        _order(bad, points=5)
        _call("outbox_replay", "--all")
        _wait_for("the corrected order's points", lambda: _order(bad).points == 15)
        if settings.HAS_TASKS:
            _double_points(good)
            _wait_for("the task", lambda: _order(good).points == 22)
        pages = _open_admin() if apps.is_installed("django.contrib.admin") else 0
        _call("outbox_doctor")
        _call("outbox_status")
    return f"handled, replayed, {pages} pages of the admin"


def prune() -> str:
    """Make days and prune, as the maintenance does."""
    return " ".join(_call("outbox_maintenance").split())


ACTS: dict[str, Callable[[], str]] = {act.__name__: act for act in (migrate, check, shop, prune)}


def _aliases() -> list[str]:
    return [alias for alias in settings.DATABASES if alias not in ("replica", "direct")]


def _call(command: str, *arguments: str) -> str:
    """Run a command of ours; fail with its output, where its exit code is not 0."""
    said = StringIO()
    try:
        call_command(command, *arguments, stdout=said, stderr=said)
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{command} ended with {end.code}:\n{said.getvalue()}") from None
    return said.getvalue()


@contextmanager
def _running(command: str, *arguments: str, tracebacks: int = 0) -> Iterator[None]:
    """Run a command in a process of its own, which logs no other tracebacks and no warning of Python's, and ends with 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "django", command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    except BaseException:
        process.kill()
        print(f"--- {command}\n{process.communicate()[0]}", file=sys.stderr)  # noqa: T201
        raise
    if process.returncode or said.count("Traceback") != tracebacks or "Warning:" in said:
        raise AssertionError(f"{command} ended with {process.returncode}:\n{said}")


def _place_order(points: int) -> int:
    if settings.ASGI:
        response: Any = asyncio.run(AsyncClient().post("/orders/", {"points": points}))
    else:
        response = Client().post("/orders/", {"points": points})
    assert response.status_code == 200, response.content
    return int(json.loads(response.content)["order"])


def _order(pk: int, **values: int) -> Any:
    from tests.setups.shop.models import Order

    orders = Order.objects.using(settings.SHOP_DATABASE)
    if values:
        orders.filter(pk=pk).update(**values)
    return orders.get(pk=pk)


def _dead_letters() -> list[Any]:
    said = StringIO()
    call_command("outbox_replay", "--state", "dead", "--json", stdout=said)
    return list(json.loads(said.getvalue())["deferred"])


def _double_points(pk: int) -> None:
    from outbox import atomic
    from tests.setups.shop.tasks import double_points

    with atomic(settings.SHOP_DATABASE):
        double_points.delay_in_transaction(pk)


def _open_admin() -> int:
    """Open each page that links of the admin lead to; return how many there are."""
    account = get_user_model()(is_superuser=True, is_staff=True)
    setattr(account, account.USERNAME_FIELD, "ada@example.com")
    account.save()
    client = Client()
    client.force_login(account)
    found, seen = {"/admin/"}, set()
    while found:
        page = found.pop()
        seen.add(page)
        response = client.get(page, follow=True)
        assert response.status_code == 200, f"{page} answers {response.status_code}"
        for link in re.findall(r'href="(/admin/outbox[^"#]*|\?[^"#]*)"', response.content.decode()):
            address = link if link.startswith("/") else page.partition("?")[0] + link
            address = address.replace("&amp;", "&")
            if address not in seen and "?" not in page:  # a filter's own filters lead to no other pages
                found.add(address)
    return len(seen)


def _wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS} s"
        time.sleep(0.05)


def main(names: list[str]) -> None:
    """Play the acts of these names, all where none is named."""
    django.setup()
    print(f"Django {django.__version__}, Python {sys.version.split()[0]}")  # noqa: T201
    for name in names or ACTS:
        started = time.monotonic()
        result = ACTS[name]()
        print(f"{name:<8} {time.monotonic() - started:5.1f} s  {result}", flush=True)  # noqa: T201
    connections.close_all()


if __name__ == "__main__":
    main(sys.argv[1:])
