"""List, replay and discard messages that were not sent, or that consumer groups have deferred, lost or ignored."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

import psycopg
from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError
from django.db.models import Count, F, Max, Min, Q, QuerySet

from outbox import conf, database
from outbox.batches.operators import replay_all, replay_messages
from outbox.consuming.acts import APPLIES, STATES, DeferredState, deferred_databases, settle
from outbox.consuming.deferred import HELD
from outbox.consuming.delivery_info import uuid_of
from outbox.consuming.register import groups
from outbox.deliver_again import deliver_again, ignored, lost
from outbox.errors import OutboxError
from outbox.logs import one_line
from outbox.management.acts import actor, confirm
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.management.times import time
from outbox.models import Act, Deferred, State
from outbox.monitoring.text import count
from outbox.relay.hosts import databases

MAX_LISTED = 1000  # messages of each database
NEVER_SENT = "This cannot be undone: discarded messages are never sent again."
NEVER_HANDLED = "This cannot be undone: discarded messages are never handled."

# All topics that the database has, including topics that are no longer in settings.
TOPIC_NAMES = "SELECT name FROM outbox_topic ORDER BY name"

# The dead messages of each topic: their number, the first one's error, and their ids; only those with some ids or of some topics,
# or all.
DEAD = f"""
SELECT count(*), t.name, (array_agg(b.last_error ORDER BY b.id))[1], array_agg(u.id ORDER BY b.id, u.n)
FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id, unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE b.state = {State.DEAD} AND u.n <> ALL(b.split) AND (%(ids)s::uuid[] IS NULL OR u.id = ANY(%(ids)s))
    AND (%(topics)s::text[] IS NULL OR t.name = ANY(%(topics)s)) GROUP BY t.name ORDER BY t.name
"""  # noqa: S608  (the state is a constant)


class Command(BaseCommand):
    help = (
        "List the messages that consumer groups have deferred, dead letters first; with MESSAGE_ID or --all, replay dead "
        "letters, with failures counted from zero. With --unsent, do this with messages that the broker rejected; with --lost or "
        "--ignored, with messages that a group lost or had no handler for, which are delivered to that group again. "
        "Exit code: 0 done, 1 something was not done, 2 a database cannot be reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("message_id", nargs="*", metavar="MESSAGE_ID", help="only these messages")
        parser.add_argument("--all", action="store_true", help="all messages that would be listed")
        kind = parser.add_mutually_exclusive_group()
        kind.add_argument("--unsent", action="store_true", help="dead messages: rejected, without a row, or perhaps published")
        kind.add_argument("--lost", action="store_true", help="messages in the open gaps of groups")
        kind.add_argument("--ignored", action="store_true", help="messages that a group ignored and now has a handler for")
        parser.add_argument("--topic", action="append", metavar="NAME", help="only of this topic; may be repeated")
        parser.add_argument("--group", action="append", metavar="NAME", help="only of this group; may be repeated")
        parser.add_argument("--type", metavar="NAME", help="only of this message type")
        parser.add_argument("--key", metavar="KEY", help="only of this key")
        parser.add_argument("--error", metavar="TEXT", help="only messages whose error or reason contains this text")
        parser.add_argument("--state", choices=[*DeferredState], help="only in this state (default: the states of the act)")
        parser.add_argument(
            "--since", type=time, metavar="TIME", help="only messages deferred since this time: 30m, 2h or 7d ago, or ISO 8601"
        )
        act = parser.add_mutually_exclusive_group()
        act.add_argument("--discard", action="store_true", help="discard the messages instead, after a confirmation")
        act.add_argument("--retry-now", action="store_true", help="let waiting messages be handled now")
        act.add_argument("--hold", action="store_true", help="keep waiting messages from being handled until --retry-now")
        parser.add_argument("--list", action="store_true", help="only list the messages that the act is for")
        parser.add_argument("--no-input", action="store_true", help="discard without a confirmation")
        parser.add_argument("--database", metavar="ALIAS", help="only in this database (default: all; with --unsent: default)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        if options["message_id"] and options["all"]:
            raise unable("Choose either MESSAGE_ID... or --all.")
        is_act = bool(options["message_id"] or options["all"])
        if not is_act and (options["discard"] or options["retry_now"] or options["hold"]):
            raise unable("Choose the messages: MESSAGE_ID... or --all.")
        try:
            if options["unsent"]:
                self._unsent(options, is_act=is_act and not options["list"])
            elif options["lost"] or options["ignored"]:
                self._undelivered(options, is_act=is_act and not options["list"])
            else:
                self._deferred(options, is_act=is_act and not options["list"])
        except (OutboxError, psycopg.Error, DatabaseError) as error:
            raise unable(error) from error

    # --- messages that were not sent ---

    def _unsent(self, options: dict[str, Any], *, is_act: bool) -> None:
        _refuse(options, ("group", "type", "key", "error", "state", "since", "retry_now", "hold"), "--unsent")
        ids = [_uuid(text) for text in options["message_id"]]
        [alias] = databases([options["database"] or "default"])
        with database.connect(alias, application_name="outbox replay") as connection:
            database.ensure_fit(alias, connection)
            _require("topic", options["topic"], [topic for (topic,) in connection.execute(TOPIC_NAMES).fetchall()])
            rows = connection.execute(DEAD, {"ids": ids or None, "topics": options["topic"]}).fetchall()
            listed = table(["dead messages", "topic", "first reason"], [row[:3] for row in rows])
            if not is_act:
                as_json = {"dead_messages": [dict(zip(("count", "topic", "reason", "ids"), row, strict=True)) for row in rows]}
                self._say(as_json, listed if rows else "No message is dead.", as_json=options["json"])
                return
            if options["discard"] and rows and not options["no_input"]:
                confirm(f"{listed}\n\nThey will be discarded. {NEVER_SENT}")
            by, discard = actor("outbox_replay"), options["discard"]
            if ids or discard:  # by ids, so that messages that have died since then are left alone
                chosen = ids or [message_id for row in rows for message_id in row[3]]
                results = [replay_messages(connection, chosen, by=by, discard=discard)]
            else:
                results = [replay_all(connection, by=by, topic=topic) for topic in options["topic"] or [None]]
        messages = sum(result.messages for result in results)
        refused = {str(message_id): reason for result in results for message_id, reason in result.refused.items()}
        done = f"{count(messages, 'message')} {'discarded' if discard else 'will be sent again'}."
        lines = [done, *(f"{message_id}: {reason}" for message_id, reason in refused.items())]
        text = "\n".join(map(one_line, lines)) if messages or refused else "No message is dead."
        self._say({"messages": messages, "refused": refused}, text, as_json=options["json"])
        if refused or not messages:
            raise SystemExit(1)

    # --- messages that groups lost or ignored ---

    def _undelivered(self, options: dict[str, Any], *, is_act: bool) -> None:
        kind = "ignored" if options["ignored"] else "lost"
        unusable = ("key", "error", "state", "retry_now", "hold", "discard")
        _refuse(options, unusable if options["ignored"] else (*unusable, "since"), f"--{kind}")
        ids = [_uuid(text) for text in options["message_id"]]
        aliases = _databases(options)
        if options["ignored"]:
            rows = [
                row for group in groups().values() if group.using in aliases for row in ignored(group, since=options["since"])
            ]
        else:
            rows = [row for alias in aliases for row in lost(alias)]
        _require("group", options["group"], {*groups(), *(row.group for row in rows)})
        _require("topic", options["topic"], {*conf.settings().topics, *(row.topic for row in rows)})
        for name in ("group", "topic"):
            rows = [row for row in rows if not options[name] or getattr(row, name) in options[name]]
        rows = [
            row for row in rows if (not options["type"] or row.type == options["type"]) and (not ids or row.message_id in ids)
        ]
        if not is_act:
            heads = ["message", "group", "topic", "type", "lane", "number", "messages", "not delivered again, because"]
            names = ("message_id", "group", "topic", "type", "lane", "number", "messages", "refused")
            listed = table(heads, [[getattr(row, name) for name in names] for row in rows])
            as_json = {kind: [row._asdict() for row in rows]}
            self._say(as_json, listed if rows else f"No {kind} messages.", as_json=options["json"])
            return
        done = deliver_again(rows, by=actor("outbox_replay"))
        missing = [str(message_id) for message_id in ids if message_id not in {row.message_id for row in rows}]
        refused = Counter[str]()
        for row in rows:
            if row.refused:
                refused[row.refused] += row.messages
        lines = [f"{count(done, 'message')} {'is' if done == 1 else 'are'} delivered again."]
        lines += [f"{number:,} not: {reason}" for reason, number in refused.items()]
        lines += [f"{text}: no group has {kind} it" for text in missing]
        self._say({"delivered_again": done, "refused": refused, "not_found": missing}, "\n".join(lines), as_json=options["json"])
        if missing or done < sum(row.messages for row in rows):
            raise SystemExit(1)

    # --- deferred messages ---

    def _deferred(self, options: dict[str, Any], *, is_act: bool) -> None:
        act, chosen = _act(options), _choose(options)
        if not is_act:
            is_for_act = options["list"] and (options["all"] or options["message_id"])
            self._list([rows.filter(APPLIES[act]) for rows in chosen] if is_for_act else chosen, as_json=options["json"])
            return
        # The ids are read before the confirmation, so that the act leaves out messages that are deferred during it.
        ids = [list(rows.filter(APPLIES[act]).values_list("id", flat=True)) for rows in chosen]
        chosen = [rows.filter(id__in=ids_of_database) for rows, ids_of_database in zip(chosen, ids, strict=True)]
        wanted = sum(map(len, ids))
        if act is Act.DISCARDED and wanted and not options["no_input"]:
            confirm(f"{_as_kinds(chosen)}\n\n{count(wanted, 'message')} will be discarded. {NEVER_HANDLED}")
        by = actor("outbox_replay")
        done = [row for rows in chosen for portion in settle(rows, act, by=by) for row in portion]
        done_ids = {name for row in done for name in (row.own_id, str(row.message_id))}
        missing = [text for text in options["message_id"] if text not in done_ids and str(uuid_of(text)) not in done_ids]
        lines = [f"{count(len(done), 'message')} {act}."]
        lines += [f"{text}: no group has deferred it, or it is in another state" for text in missing]
        self._say({str(act): len(done), "not_found": missing}, "\n".join(map(one_line, lines)), as_json=options["json"])
        if missing or len(done) < wanted:
            raise SystemExit(1)

    def _list(self, chosen: Sequence[QuerySet[Deferred]], *, as_json: bool) -> None:
        rows = [row for queryset in chosen for row in queryset.order_by(F("dead_at").desc(nulls_last=True), "id")[:MAX_LISTED]]
        if as_json:
            listed = [_as_dict(row) for row in rows]
            self.stdout.write(json.dumps({"deferred": listed}, default=str))
        elif not rows:
            self.stdout.write("No deferred messages.")
        else:
            more = [f"There may be more: the first {MAX_LISTED} of each database are listed."] if len(rows) >= MAX_LISTED else []
            self.stdout.write("\n\n".join([_as_kinds(chosen), _as_table(rows), *more]))

    def _say(self, as_dict: dict[str, Any], text: str, *, as_json: bool) -> None:
        self.stdout.write(json.dumps(as_dict, default=str) if as_json else text)


def _act(options: dict[str, Any]) -> Act:
    if options["discard"]:
        return Act.DISCARDED
    if options["retry_now"]:
        return Act.RETRIED_NOW
    return Act.HELD if options["hold"] else Act.REPLAYED


def _databases(options: dict[str, Any]) -> list[str]:
    """
    Return the databases to read.

    Raises:
        CommandError: no group has its inbox in the database of the option.
        NotMigrated, psycopg.Error: one has no tables of the outbox, or cannot be reached.
    """
    known = deferred_databases()
    if options["database"] and options["database"] not in known:
        raise unable(f"No group has its inbox in database {options['database']!r}. Choices are: {', '.join(known)}.")
    chosen = [options["database"]] if options["database"] else known
    for alias in chosen:
        with database.connect(alias, application_name="outbox replay") as connection:
            database.ensure_fit(alias, connection)
    return chosen


def _choose(options: dict[str, Any]) -> list[QuerySet[Deferred]]:
    """Return the deferred messages that the options choose, of each database."""
    of_databases = [Deferred.objects.using(alias).defer("body", "headers") for alias in _databases(options)]
    known = {pair for rows in of_databases for pair in rows.order_by().values_list("consumer_group", "topic").distinct()}
    _require("group", options["group"], {*groups(), *(group for group, _ in known)})
    _require("topic", options["topic"], {*conf.settings().topics, *(topic for _, topic in known)})
    names = {"consumer_group__in": "group", "topic__in": "topic", "type": "type", "key": "key", "deferred_at__gte": "since"}
    wanted = Q(**{lookup: options[name] for lookup, name in names.items() if options[name]})
    if ids := options["message_id"]:
        wanted &= Q(own_id__in=ids) | Q(message_id__in=[uuid_of(text) for text in ids])
    if text := options["error"]:
        wanted &= Q(error__icontains=text) | Q(reason__icontains=text) | Q(fingerprint__icontains=text)
    if options["state"]:
        wanted &= STATES[DeferredState(options["state"])]
    return [rows.filter(wanted) for rows in of_databases]


def _refuse(options: dict[str, Any], names: Sequence[str], kind: str) -> None:
    """Raise CommandError if one of these options is used, since it has no meaning together with `kind`."""
    if wrong := [name for name in names if options[name]]:
        raise unable(f"--{wrong[0].replace('_', '-')} cannot be used with {kind}.")


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError as error:
        raise unable(f"{text!r} is not a message id.") from error


def _require(noun: str, given: Sequence[str] | None, known: Collection[str]) -> None:
    for name in given or ():
        if name not in known:
            raise unable(f"There is no {noun} {name!r}. Choices are: {', '.join(sorted(known)) or 'none'}.")


def _state(row: Deferred) -> str:
    if row.dead_at:
        return "dead"
    if row.due_at is None:
        return "asleep"
    return "held" if database.aware(row.due_at) >= HELD else "waiting"


def _as_dict(row: Deferred) -> dict[str, Any]:
    names = ("consumer_group", "topic", "type", "key", "reason", "error", "failures", "crashes", "runs", "deferred_at", "due_at")
    return {"message_id": row.own_id, "state": _state(row)} | {name: getattr(row, name) for name in (*names, "dead_at")}


def _as_kinds(chosen: Sequence[QuerySet[Deferred]]) -> str:
    """Return a table that counts the messages by group, topic, reason and similar errors, the most frequent first."""
    columns = ("consumer_group", "topic", "reason", "fingerprint")
    heads = ["messages", "group", "topic", "reason", "error", "first", "last"]
    rows = [
        row
        for rows in chosen
        for row in rows.order_by().values_list(*columns).annotate(Count("id"), Min("deferred_at"), Max("deferred_at"))
    ]
    rows.sort(key=lambda row: (-row[4], row[:4]))
    cells = [[count, *row, f"{first:%Y-%m-%d %H:%M:%S}", f"{last:%Y-%m-%d %H:%M:%S}"] for *row, count, first, last in rows]
    return table(heads, [[" ".join(cell.split()) if isinstance(cell, str) else cell for cell in row] for row in cells])


def _as_table(rows: Sequence[Deferred]) -> str:
    heads = ["message", "group", "topic", "state", "failures", "deferred at", "reason", "error"]
    cells = [
        [
            *(row.own_id, row.consumer_group, row.topic, _state(row), row.failures, f"{row.deferred_at:%Y-%m-%d %H:%M:%S}"),
            *(row.reason, " ".join(row.error.split())),
        ]
        for row in rows
    ]
    return table(heads, cells)
