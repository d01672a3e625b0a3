"""The results of `outbox_status --message`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict

from outbox.ids import made_at
from outbox.logs import one_line
from outbox.monitoring.connection import connected
from outbox.monitoring.find import MAX_SECONDS, FoundMessage, Search, find, read_found
from outbox.monitoring.timeline import TimelineEntry, read_timeline
from outbox.monitoring.why import why

SHOWN = 20  # messages of each database

NONE_FOUND = "No such message: never published here, rolled back with its transaction, or pruned."
NOT_FOUND = "No such message among those that were read."


def find_in(alias: str, search: Search, *, since: datetime | None, until: datetime | None) -> dict[str, Any]:
    """
    Return the messages of a database that match a search, newest first; if there is only one, also its timeline.

    `is_cut`: whether more messages match, or may match. `reached`: the bodies of messages published before this time were not
    read; None if all were read, or if no body had to be. `is_late`: whether the search ended because it took too long.
    """
    with connected(alias, "outbox status") as connection:
        matches = find(connection, search, since=since, until=until, limit=SHOWN)
        found = read_found(connection, matches.ids)
        messages = [_as_dict(message) | {"why": why(connection, message.id, using=alias)} for message in found]
    reached = None if matches.reached is None else made_at(matches.reached)
    timeline = read_timeline(alias, matches.ids[0]) if len(messages) == 1 else None
    entries = [_entry(entry) for entry in timeline.entries] if timeline else []
    extent = {"is_cut": matches.is_cut, "reached": reached, "is_late": matches.is_late}
    return {"database": alias, "messages": messages, **extent, "timeline": entries}


def _as_dict(message: FoundMessage) -> dict[str, Any]:
    names = ("topic", "type", "key", "about", "state")
    known = {"id": str(message.id)} | {name: getattr(message, name) for name in names}
    return known | {"published_at": message.created_at.astimezone(UTC).isoformat()}


def _entry(entry: TimelineEntry) -> dict[str, Any]:
    shown = asdict(entry)
    return {"at": entry.at.astimezone(UTC).isoformat()} | {name: shown[name] for name in ("what", "who", "by", "text")}


def as_text(found: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of a text about the messages that were found in a database."""
    for message in found["messages"]:
        yield "\n".join(map(one_line, [_first_line(message), message["why"] or "", *map(_entry_line, found["timeline"])]))
    if found["reached"] is not None:
        at = found["reached"].isoformat(timespec="milliseconds")
        within = f" within {MAX_SECONDS:.0f} s" if found["is_late"] else ""
        yield f"Only messages since {at} were read{within}, since bodies have no index. For older ones: --until {at}"
    elif found["is_late"]:
        yield f"The search took longer than {MAX_SECONDS:.0f} s. Narrow it with --since and --until."
    elif found["is_cut"]:
        yield f"There are more: these are the newest {SHOWN}. Narrow the search with --since and --until."


def _first_line(message: dict[str, Any]) -> str:
    parts = [f"Message {message['id']}", message["type"], f"topic {message['topic']}"]
    parts += [f"{name} {message[name]}" for name in ("key", "about") if message[name]]
    return f"{', '.join(filter(None, parts))}, {message['state']}, published {message['published_at']}"


def _entry_line(entry: dict[str, Any]) -> str:
    by = entry["by"] and f"by {entry['by']}"
    return f"  {entry['at']}  " + " ".join(filter(None, [entry["what"], entry["who"], by, entry["text"]]))
