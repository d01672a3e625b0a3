import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from django.conf import settings
from django.db import connections

from tests.database_url import url_of

CONSUMERS = """
from outbox import consumer
from outbox.message import message_types
from tests.journeys.releases.run import handled

for kind in message_types().values():
    consumer(kind, group="mail")(lambda message, context: handled.append(repr(message)))
"""

OTHER_TYPE = """
from typing import Annotated
import msgspec
from outbox import Message


class OrderPaid(Message):
    order_id: int

    class Meta:
        topic = "orders"


"""

PLACED = """class OrderPlaced(Message):
    order_id: int
    customer: str
    note: str = ""

    class Meta:
        topic = "orders"
        key = "order_id"
        version = 2
"""

UPGRADE = """

@OrderPlaced.upgrade_from(1)
def upgrade(body):
    return body
"""

UPGRADE_2 = """

@OrderPlaced.upgrade_from(2)
def name_the_client(body):
    body["client"] = body.pop("customer")
    return body
"""

OLD = PLACED + UPGRADE


@dataclass(frozen=True)
class Release:
    """
    The next release, and what is said of it.

    Args:
        messages: its types, beside one that stays.
        check: what `outbox_schema --check` says; "" if it passes.
        against: what `--against-database` says of the message that waits; "" if it can be read.
        handled: what the handler gets after the deployment; "" if it gets nothing.
    """

    messages: str
    check: str
    against: str = ""
    handled: str = "OrderPlaced(order_id=1, customer='Ann', note='')"


def edited(old: str, new: str, *more: str) -> str:
    """Return the old release with one edit, and with what is added."""
    assert old in OLD
    return OLD.replace(old, new) + "".join(more)


WRITE = "Run manage.py outbox_schema --write, and commit it."
GONE = "of OrderPlaced version 2 cannot be read: no module here defines the type"
NEXT = "Or write `version = 3` in class Meta of OrderPlaced, and add a function with @OrderPlaced.upgrade_from(2)."

BREAKS = {
    "a lost field": Release(
        edited('    note: str = ""\n', ""),
        f"has lost the field note, which older messages have.\n    Restore it. {NEXT}",
        handled="OrderPlaced(order_id=1, customer='Ann')",
    ),
    "a renamed field": Release(
        edited("customer", "client"),
        f"has renamed the field customer to client: older messages have customer, and readers of the last release look for it.\n"
        f'    Write `client: ... = msgspec.field(name="customer")`. {NEXT}',
        "of OrderPlaced version 2 cannot be read: Object missing required field `client`",
        handled="",
    ),
    "a narrowed field": Release(
        edited("order_id: int", "order_id: Annotated[int, msgspec.Meta(ge=2)]"),
        "no longer accepts integer in the field order_id, only integer (at least 2): older messages cannot be read.",
        "of OrderPlaced version 2 cannot be read: Expected `int` >= 2 - at `$.order_id`",
        handled="",
    ),
    "a field of another type": Release(
        edited("order_id: int", "order_id: str"),
        "no longer accepts integer in the field order_id, only string: older messages cannot be read.",
        "of OrderPlaced version 2 cannot be read: Expected `str`, got `int` - at `$.order_id`",
        handled="",
    ),
    "a widened field": Release(
        edited("customer: str", "customer: str | None"),
        "accepts null in the field customer, but readers of the last release accept only string.",
    ),
    "a new field without a default": Release(
        edited("    customer: str\n", "    customer: str\n    total: int\n"),
        f"requires the field total, which older messages lack.\n    Give it a default. {NEXT}",
        "of OrderPlaced version 2 cannot be read: Object missing required field `total`",
        handled="",
    ),
    "a missing upgrade": Release(
        edited("version = 2", "version = 3"),
        "has version 3, but no upgrade from version 2: messages of that version cannot be read.\n"
        "    Add a function with @OrderPlaced.upgrade_from(2).",
        "of OrderPlaced version 2 has no upgrade from version 2",
        handled="",
    ),
    "an upgrade that fails": Release(
        edited("version = 2", "version = 3", UPGRADE_2.replace('"customer"', '"buyer"')),
        WRITE,
        "of OrderPlaced version 2 cannot be read: an upgrade fails with KeyError: 'buyer'",
        handled="",
    ),
    "a lost upgrade": Release(PLACED, "has lost its upgrade from version 1: messages of that version cannot be read."),
    "a lower version": Release(
        edited("version = 2", "version = 1").replace(UPGRADE, ""),
        "has version 1, and had 2.\n    Write `version = 2` in class Meta of OrderPlaced, or more.",
    ),
    "a type with another name": Release(
        edited("OrderPlaced", "OrderTaken"),
        "is OrderTaken now: no handler handles its older messages, and readers of the last release do not know OrderTaken.\n"
        '    Write `type = "OrderPlaced"` in class Meta of OrderTaken.',
        GONE,
        handled="",
    ),
    "a type that is gone": Release(
        "", "was removed: its messages that wait, or are dead letters, cannot be read.", GONE, handled=""
    ),
    "another topic": Release(
        edited('topic = "orders"', 'topic = "sales"'),
        "has the topic 'sales', and had 'orders', from which readers of the last release receive it.",
        "of OrderPlaced version 2 cannot be read: its type has another topic than 'orders' now",
        handled="",
    ),
    "another key": Release(
        edited('key = "order_id"', 'key = "customer"'),
        "has the key 'customer', and had 'order_id': order and searches use another value.",
    ),
}

MENDED = {
    "nothing": Release(OLD, ""),
    "a new field with a default": Release(
        edited('    note: str = ""\n', '    note: str = ""\n    total: int = 0\n'),
        WRITE,
        handled="OrderPlaced(order_id=1, customer='Ann', note='', total=0)",
    ),
    "a renamed field that keeps its name in the body": Release(
        edited("customer: str", 'client: str = msgspec.field(name="customer")'),
        "",
        handled="OrderPlaced(order_id=1, client='Ann', note='')",
    ),
    "a renamed field with a version and an upgrade": Release(
        edited("customer", "client").replace("version = 2", "version = 3") + UPGRADE_2,
        WRITE,
        handled="OrderPlaced(order_id=1, client='Ann', note='')",
    ),
    "a renamed class that keeps its name on the wire": Release(
        edited("OrderPlaced", "OrderTaken").replace("version = 2", 'version = 2\n        type = "OrderPlaced"'),
        "",
        handled="OrderTaken(order_id=1, customer='Ann', note='')",
    ),
}


@dataclass
class Shop:
    """A folder with the app of one release after the other, and databases that are copies of the old release's."""

    folder: Path
    server: psycopg.Connection
    name: str

    def url(self, database: str) -> str:
        return url_of({**connections["default"].settings_dict, "NAME": database})

    def run(self, messages: str, database: str, *steps: str) -> list[tuple[int, str]]:
        """Run steps of a release, and return what became of each."""
        (self.folder / "shop" / "messages.py").write_text(OTHER_TYPE + messages)
        environment = {
            **os.environ,
            "DATABASE_URL": self.url(database),
            "DJANGO_SETTINGS_MODULE": "tests.journeys.releases.settings",
            "RELEASE_DIR": str(self.folder),
            "PYTHONPATH": f"{self.folder}{os.pathsep}{settings.BASE_DIR}",
            "PYTHONDONTWRITEBYTECODE": "1",  # two releases may be written within a second
        }
        command = [sys.executable, "-m", "tests.journeys.releases.run", *steps]
        done = subprocess.run(command, env=environment, cwd=settings.BASE_DIR, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    def deploy(self, release: Release) -> dict[str, tuple[int, str]]:
        """Check the next release, deploy it, and return what became of each step."""
        copy = f"{self.name}_next"
        self.server.execute(f'CREATE DATABASE "{copy}" TEMPLATE "{self.name}"')
        try:
            steps = ("check", "against", "relay", "consume", "handled")
            return dict(zip(steps, self.run(release.messages, copy, *steps), strict=True))
        finally:
            self.server.execute(f'DROP DATABASE "{copy}" WITH (FORCE)')


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, django_db_setup: None) -> Iterator[Shop]:
    """The old release: its snapshot is written, one message is at its broker, and one waits to be sent."""
    folder = tmp_path_factory.mktemp("releases")
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").touch()
    (folder / "shop" / "consumers.py").write_text(CONSUMERS)
    database = connections["default"].settings_dict
    name = f"{database['NAME']}_releases"
    with psycopg.connect(url_of({**database, "NAME": "postgres"}), autocommit=True) as server:
        shop = Shop(folder, server, name)
        server.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        server.execute(f'CREATE DATABASE "{name}"')
        try:
            shop.run(OLD, name, "migrate", "write", "publish", "relay", "publish")
            yield shop
        finally:
            server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


class TestARelease:
    @pytest.mark.parametrize("release", [*BREAKS.values(), *MENDED.values()], ids=[*BREAKS, *MENDED])
    def test_is_told_before_its_deployment_what_happens_after_it(self, shop: Shop, release: Release):
        ended = shop.deploy(release)

        code, said = ended["check"]
        assert release.check in said
        assert code == bool(release.check)
        code, said = ended["against"]
        assert code == bool(release.against)
        for place in ("waiting message", "unread message of group 'mail'") if release.against else ():
            assert f"1 {place} {release.against}" in said
        count, handled = ended["handled"]
        assert handled.splitlines() == [release.handled] * count
        assert count == (2 if release.handled else 0)
