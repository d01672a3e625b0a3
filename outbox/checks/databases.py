"""Check databases and routers by their settings, without a connection."""

from __future__ import annotations

from collections.abc import Iterable

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import connections, router
from django.db.backends.postgresql.psycopg_any import is_psycopg3

from outbox import database
from outbox.checks.decorators import check
from outbox.checks.settings import known_settings
from outbox.models import MessageRow

NOT_PROJECT_APPS = ("django.", "rest_framework", "outbox.")


@check()
def check_engine() -> Iterable[CheckMessage]:
    """
    E007: The database for messages is not PostgreSQL, is not used with psycopg 3, or is not in DATABASES.

    Set its ENGINE to `django.db.backends.postgresql` and install psycopg, or route the app outbox to such a database.
    """
    alias = router.db_for_write(MessageRow)
    if alias not in connections.settings:
        hint = f"Let db_for_write() of the routers return one of these, or None: {', '.join(sorted(connections.settings))}."
        text = f"Routers put the app outbox into the database {alias!r}, which is not in DATABASES."
        yield Error(text, hint=hint, id="outbox.E007")
        return
    vendor = connections[alias].vendor
    if vendor != "postgresql" or not is_psycopg3:
        problem = f"is {vendor}" if vendor != "postgresql" else "is used with psycopg2"
        yield Error(
            f"Database {alias!r} {problem}. The outbox needs PostgreSQL 14 or later, with psycopg 3.",
            hint='Set its ENGINE to "django.db.backends.postgresql" and install psycopg, or route the models of '
            "the app outbox to such a database.",
            id="outbox.E007",
        )


@check()
def check_direct_databases() -> Iterable[CheckMessage]:
    """
    E044: `OUTBOX["DIRECT_DATABASES"]` names an alias that is no PostgreSQL database in DATABASES, or has an alias on both sides.

    The key is the alias that messages are published to, the value the alias that bypasses its pooler.
    """
    direct_aliases = known_settings().direct_databases
    for alias, direct in direct_aliases.items():
        wrong = [name for name in (alias, direct) if name not in connections.settings or connections[name].vendor != "postgresql"]
        if wrong or direct in direct_aliases:
            problem = "does not name PostgreSQL databases of DATABASES" if wrong else "has one alias on both sides"
            hint = "The key is the alias that messages are published to, the value the alias that bypasses its pooler."
            if wrong:
                hint = f"Add {', '.join(map(repr, wrong))} to DATABASES, or correct the name."
            yield Error(f'OUTBOX["DIRECT_DATABASES"] = {{"{alias}": "{direct}"}} {problem}.', hint=hint, id="outbox.E044")


@check()
def check_replicas() -> Iterable[CheckMessage]:
    """
    W021: Routers read the outbox from another database than they write it to, or allow its tables in a replica.

    A replica lags behind, so its data about a message may be old. Let `db_for_read` return the same database as `db_for_write`
    for each app of the outbox, and let `allow_migrate` return False for replicas, so that no relay searches for messages there.
    """
    for app in database.own_apps():
        model = next(iter(app.get_models()), None)
        if model is None:
            continue
        reads, writes = router.db_for_read(model), router.db_for_write(model)
        if reads != writes:
            text = f"The routers read the models of the app {app.label} from {reads!r} and write them to {writes!r}."
            hint = f'Let db_for_read() return the primary if model._meta.app_label is "{app.label}".'
            yield Caution(text, hint=hint, id="outbox.W021")
    for alias in database.outbox_databases():
        if primary := connections[alias].settings_dict["TEST"]["MIRROR"]:
            replica = f"Database {alias!r} is a replica of {primary!r}"
            text = f"{replica}, but the routers allow the outbox's tables there, so relays search it for messages."
            yield Caution(text, hint=f"Let allow_migrate() return False for {alias!r}.", id="outbox.W021")


@check()
def check_business_rows() -> Iterable[CheckMessage]:
    """
    W022: Routers write the outbox to a database that has no other tables of the project.

    A message is committed atomically with your rows only if both are in the same database. Route the app outbox to the database
    of your rows. If each transaction names its database with `using=`, silence this check.
    """
    home = router.db_for_write(MessageRow)
    homes = {
        router.db_for_write(model)
        for model in apps.get_models()
        if model._meta.managed and not f"{model.__module__}.".startswith(NOT_PROJECT_APPS)
    }
    if homes and home not in homes:
        yield Caution(
            f"The routers write messages to {home!r} and all other models to {', '.join(map(repr, sorted(homes)))}, so a message "
            "and your rows cannot share a transaction.",
            hint="Let db_for_write() and allow_migrate() put the app outbox in the database of those models.",
            id="outbox.W022",
        )


@check()
def check_autocommit() -> Iterable[CheckMessage]:
    """
    E059: A database of the outbox has `AUTOCOMMIT: False`.

    Then Django's `atomic()` does not commit: messages are not committed, and consumers wait for locks that another connection of
    their own process holds. Remove `AUTOCOMMIT`.
    """
    return [
        Error(
            f"Database {alias!r} has AUTOCOMMIT = False, so Django's atomic() does not commit and no message is sent.",
            hint=f'Remove AUTOCOMMIT from DATABASES["{alias}"].',
            id="outbox.E059",
        )
        for alias in database.outbox_databases()
        if not connections[alias].settings_dict["AUTOCOMMIT"]
    ]


@check()
def check_prepared_statements() -> Iterable[CheckMessage]:
    """
    W023: Statements are prepared on a database behind a pooler in transaction mode.

    `DISABLE_SERVER_SIDE_CURSORS` indicates such a pooler. A statement that was prepared through it does not exist on the next
    backend: remove `prepare_threshold`. If the pooler supports prepared statements (PgBouncer 1.22 with
    `max_prepared_statements`, and psycopg with the libpq of PostgreSQL 17), silence this check.
    """
    return [
        Caution(
            f"Database {alias!r} has DISABLE_SERVER_SIDE_CURSORS, which indicates a pooler in transaction mode, and "
            f"prepare_threshold = {threshold}.",
            hint="Remove prepare_threshold, or connect without the pooler.",
            id="outbox.W023",
        )
        for alias in database.outbox_databases()
        if connections[alias].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
        and (threshold := connections[alias].settings_dict["OPTIONS"].get("prepare_threshold")) is not None
    ]
