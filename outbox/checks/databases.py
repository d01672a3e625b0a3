"""Databases and routers, as far as settings tell."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import connections, router
from django.db.backends.postgresql.psycopg_any import is_psycopg3

from outbox import database
from outbox.checks.settings import known_settings
from outbox.models import MessageRow

NOT_BUSINESS = ("django.", "rest_framework", "outbox.")


def check_engine(**kwargs: Any) -> list[CheckMessage]:
    """
    E007: The database that messages go to is not PostgreSQL, or not reached by psycopg 3.

    Set its ENGINE to `django.db.backends.postgresql` and install psycopg, or route the app outbox to such a database.
    """
    alias = router.db_for_write(MessageRow)
    vendor = connections[alias].vendor
    if vendor == "postgresql" and is_psycopg3:
        return []
    what = f"is {vendor}" if vendor != "postgresql" else "is reached by psycopg2"
    return [
        Error(
            f"Database {alias!r} {what}. The outbox needs PostgreSQL 14 or later, by psycopg 3.",
            hint='Set its ENGINE to "django.db.backends.postgresql" and install psycopg, or route the models of '
            "the app outbox to such a database.",
            id="outbox.E007",
        )
    ]


def check_direct_databases(**kwargs: Any) -> list[CheckMessage]:
    """
    E044: `OUTBOX["DIRECT_DATABASES"]` names what is no alias of a PostgreSQL in DATABASES, or one alias on both sides.

    On the left stands the alias that messages go to, on the right the one that leads around its pooler.
    """
    found: list[CheckMessage] = []
    named = known_settings().direct_databases
    for alias, direct in named.items():
        wrong = [one for one in (alias, direct) if one not in connections.settings or connections[one].vendor != "postgresql"]
        if wrong or direct in named:
            what = "names no PostgreSQL of DATABASES" if wrong else "has one alias on both sides"
            found.append(
                Error(
                    f'OUTBOX["DIRECT_DATABASES"] = {{"{alias}": "{direct}"}} {what}.',
                    hint=f"Add {', '.join(map(repr, wrong))} to DATABASES, or correct the name."
                    if wrong
                    else "Name the alias that messages go to on the left, and the one that leads around its pooler on the right.",
                    id="outbox.E044",
                )
            )
    return found


def check_replicas(**kwargs: Any) -> list[CheckMessage]:
    """
    W021: Routers send reads of the outbox to another database than its writes, or let its tables into a replica.

    A replica lags: what is asked of it about a message may be old. Have `db_for_read` give the same as `db_for_write` for
    each app of the outbox, and `allow_migrate` False for replicas, so that no relay looks for messages there.
    """
    found: list[CheckMessage] = []
    for app in database.outbox_apps():
        model = next(app.get_models())
        reads, writes = router.db_for_read(model), router.db_for_write(model)
        if reads != writes:
            found.append(
                Caution(
                    f"The routers read the models of the app {app.label} from {reads!r} and write them to {writes!r}.",
                    hint=f'Have db_for_read() give the primary where model._meta.app_label is "{app.label}".',
                    id="outbox.W021",
                )
            )
    for alias in database.outbox_databases():
        if primary := connections[alias].settings_dict["TEST"]["MIRROR"]:
            found.append(
                Caution(
                    f"Database {alias!r} is a replica of {primary!r}, and the routers allow the outbox's tables there: "
                    "relays look for messages in it.",
                    hint=f"Have allow_migrate() refuse {alias!r}.",
                    id="outbox.W021",
                )
            )
    return found


def check_business_rows(**kwargs: Any) -> list[CheckMessage]:
    """
    W022: Routers write the outbox to a database that holds no other rows of the project.

    A message commits with the rows it speaks of only in one transaction, so in one database. Route the app outbox to
    where they are. Where each transaction names its database by `using=`, silence this check.
    """
    home = router.db_for_write(MessageRow)
    homes = {
        router.db_for_write(model)
        for model in apps.get_models()
        if model._meta.managed and not f"{model.__module__}.".startswith(NOT_BUSINESS)
    }
    if not homes or home in homes:
        return []
    return [
        Caution(
            f"The routers write messages to {home!r} and all other models to {', '.join(map(repr, sorted(homes)))}: "
            "a message and its rows share no transaction.",
            hint="Have db_for_write() and allow_migrate() put the app outbox where those models are.",
            id="outbox.W022",
        )
    ]


def check_prepared_statements(**kwargs: Any) -> list[CheckMessage]:
    """
    W023: A database behind a pooler in transaction mode is to keep prepared statements.

    `DISABLE_SERVER_SIDE_CURSORS` says that there is such a pooler. A statement prepared over it is missing on the next
    connection: leave `prepare_threshold` out, unless the pooler carries prepared statements along (PgBouncer 1.22 with
    `max_prepared_statements`, and psycopg with a libpq of PostgreSQL 17); then silence this check.
    """
    return [
        Caution(
            f"Database {alias!r} has DISABLE_SERVER_SIDE_CURSORS, so a pooler in transaction mode, and "
            f"prepare_threshold = {threshold}.",
            hint="Leave prepare_threshold out, or connect without the pooler.",
            id="outbox.W023",
        )
        for alias in database.outbox_databases()
        if connections[alias].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
        and (threshold := connections[alias].settings_dict["OPTIONS"].get("prepare_threshold")) is not None
    ]
