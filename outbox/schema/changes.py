"""
Changes since the last snapshot. A change breaks others if a message of the last release cannot be read, or if a program that has
the last release cannot read a new message. For such changes, the line of code that corrects them is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

import msgspec

from outbox.message import Message
from outbox.schema.misfits import MisfitKind, misfits
from outbox.schema.snapshot import Snapshot, TypeSnapshot

ACCEPT = "If no such message can arrive any more, run outbox_schema --write --accept-breaks."


class Change(msgspec.Struct, frozen=True):
    """
    A change of a message type since the last snapshot.

    Args:
        type: the type's name on the wire.
        text: the change, and the readers that it breaks.
        hint: the line of code that corrects it; "" for a change that breaks nobody.
        breaks: whether a message of the last release cannot be read, or a reader of the last release cannot read a new one.
    """

    type: str
    text: str
    hint: str = ""
    breaks: bool = True


def changes(old: Snapshot, new: Snapshot, types: Mapping[str, type[Message]]) -> list[Change]:
    """
    Return the changes by type. For each type, they are all changes that break others; without any, that it is new or differs.

    Args:
        types: the message types of the new snapshot, for the names of their classes.
    """
    differences: list[Change] = []
    for name in sorted(old.types.keys() - new.types.keys()):
        differences.append(_removal(name, old, new, types))
    for name in sorted(new.types):
        if name not in old.types:
            differences.append(Change(name, "is new", breaks=False))
        elif old.types[name] != new.types[name]:
            breaks = list(_breaks(name, old.types[name], new.types[name], types[name].__name__))
            differences += breaks or [Change(name, "differs, in a way that breaks nobody", breaks=False)]
    return differences


def _removal(name: str, old: Snapshot, new: Snapshot, types: Mapping[str, type[Message]]) -> Change:
    before = old.types[name]
    for other in sorted(new.types.keys() - old.types.keys()):
        after = new.types[other]
        is_alike = (after.topic, after.key) == (before.topic, before.key)
        if is_alike and not misfits(before.schema, after.schema) and not misfits(after.schema, before.schema):
            text = f"is {other} now: no handler handles its older messages, and readers of the last release do not know {other}"
            return Change(name, text, f'Write `type = "{name}"` in class Meta of {types[other].__name__}.')
    text = "was removed: its messages that wait, or are dead letters, cannot be read"
    return Change(name, text, f"Restore the class, and only remove the code that publishes it. {ACCEPT}")


def _breaks(name: str, before: TypeSnapshot, after: TypeSnapshot, cls: str) -> Iterator[Change]:
    meta = f"in class Meta of {cls}"
    if after.topic != before.topic:
        text = f"has the topic {after.topic!r}, and had {before.topic!r}, from which readers of the last release receive it"
        yield Change(name, text, f'Write `topic = "{before.topic}"` {meta}, or give the new topic to a new type.')
    if after.key != before.key:
        text = f"has the key {after.key!r}, and had {before.key!r}: order and searches use another value"
        yield Change(name, text, f'Write `key = "{before.key}"` {meta}, or give the new key to a new type.')
    if before.tag and after.tag != before.tag:
        text = f"has the tag {after.tag!r}, and had {before.tag!r}, by which readers of the last release may subscribe"
        yield Change(name, text, f'Write `tag = "{before.tag}"` {meta}, or give the new tag to a new type.')
    if after.version < before.version:
        text = f"has version {after.version}, and had {before.version}"
        yield Change(name, text, f"Write `version = {before.version}` {meta}, or more.")
    elif after.version == before.version:
        yield from _breaks_of_fields(name, before, after, cls)
    for version in range(before.version, after.version):
        if version not in after.upgrades:
            text = f"has version {after.version}, but no upgrade from version {version}: messages of that version cannot be read"
            yield Change(name, text, f"Add a function with @{cls}.upgrade_from({version}).")
    for version in before.upgrades:
        if version < before.version and version not in after.upgrades:
            text = f"has lost its upgrade from version {version}: messages of that version cannot be read"
            yield Change(name, text, f"Restore the function with @{cls}.upgrade_from({version}). {ACCEPT}")


def _breaks_of_fields(name: str, before: TypeSnapshot, after: TypeSnapshot, cls: str) -> Iterator[Change]:
    """
    Yield the breaking changes in the fields of a type with an unchanged version.

    First come changes because of which this release cannot read older messages, then those because of which the last release
    cannot read new ones.
    """
    version_line = (
        f"`version = {after.version + 1}` in class Meta of {cls}, and add a function with @{cls}.upgrade_from({after.version})."
    )
    broken = sorted(misfits(before.schema, after.schema), key=attrgetter("path"))
    # A lost field -> the only new field with the same schema. It is taken for the lost one under a new name.
    new_names = {misfit.path: _sibling(misfit.path, misfit.alike[0]) for misfit in broken if len(misfit.alike) == 1}
    reported = {*(misfit.path for misfit in broken), *new_names.values()}
    for misfit in broken:
        field = f"field {misfit.path}" if misfit.path else "body"
        if misfit.kind is MisfitKind.REFUSED:
            text = f"no longer accepts {misfit.written} in the {field}, only {misfit.read}: older messages cannot be read"
            yield Change(name, text, f"Write {version_line}")
        elif misfit.kind is MisfitKind.MISSING and misfit.path not in new_names.values():
            yield Change(name, f"requires the {field}, which older messages lack", f"Give it a default. Or write {version_line}")
        elif misfit.path in new_names:
            new = misfit.alike[0]
            old = misfit.path.rpartition(".")[2]
            text = f"has renamed the {field} to {new}: older messages have {old}, and readers of the last release look for it"
            yield Change(name, text, f'Write `{new}: ... = msgspec.field(name="{old}")`. Or write {version_line}')
        elif misfit.kind is MisfitKind.IGNORED:
            yield Change(name, f"has lost the {field}, which older messages have", f"Restore it. Or write {version_line}")
    for misfit in sorted(misfits(after.schema, before.schema), key=attrgetter("path")):
        if misfit.kind is MisfitKind.REFUSED and misfit.path not in reported:
            field = f"field {misfit.path}" if misfit.path else "body"
            text = f"accepts {misfit.written} in the {field}, but readers of the last release accept only {misfit.read}"
            yield Change(name, text, f"Write {version_line}")


def _sibling(path: str, name: str) -> str:
    """Return the path of another field of the object that contains the field `path`."""
    return f"{path.rpartition('.')[0]}.{name}".lstrip(".")
