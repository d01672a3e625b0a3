"""Messages of failed assertions: the messages published instead, and how the most similar messages differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from outbox.testing.published import Kind, Published

SHOWN = 3  # messages
MAX_WIDTH = 200


def miscounted(
    kind: Kind | None, fields: Mapping[str, object], *, times: int, matching: Sequence[Published], others: Sequence[Published]
) -> str:
    """Explain that something was published more or less often than expected."""
    count = f"published {_times(len(matching))}, not {_times(times)}" if matching else "not published"
    head = f"{_name(kind, fields)} was {count}."
    if len(matching) > times:
        return "\n".join([head, *(f"  {line}" for line in _short(matching))])
    return "\n".join([head, *_instead(kind, fields, others)])


def unexpected(kind: Kind | None, fields: Mapping[str, object], matching: Sequence[Published]) -> str:
    """Explain that something was published although nothing should have been."""
    head = f"{len(matching)} messages were published" if len(matching) > 1 else "A message was published"
    of_kind = f", of {_name(kind, fields)}" if kind is not None else ""
    return "\n".join([f"{head}{of_kind}:", *(f"  {line}" for line in _short(matching))])


def _instead(kind: Kind | None, fields: Mapping[str, object], others: Sequence[Published]) -> list[str]:
    if not others:
        return [
            "This test sees no published message. Was the transaction rolled back? Check the status of the response, or the "
            "errors of the code under test."
        ]
    alike = sorted((other for other in others if other.is_of(kind)), key=lambda other: len(other.differences(fields)))
    lines = [f"  {_cut(str(other))}: {'; '.join(other.differences(fields))}" for other in alike[:SHOWN]]
    parts = ["Most similar:", *lines] if alike else []
    if len(alike) > SHOWN:
        parts.append(f"  and {len(alike) - SHOWN} more of them")
    rest = Counter(
        type(other.message).__name__ if other.headers.get("ce-type") else f"raw to {other.topic!r}"
        for other in others
        if not other.is_of(kind)
    )
    if rest:
        parts.append("Also published: " if alike else "Published instead: ")
        parts[-1] += ", ".join(f"{count} x {name}" for name, count in sorted(rest.items()))
    return parts


def _name(kind: Kind | None, fields: Mapping[str, object]) -> str:
    name = "A message" if kind is None else f"A message to {kind!r}" if isinstance(kind, str) else kind.__name__
    return f"{name}({', '.join(f'{field}={value!r}' for field, value in fields.items())})" if fields else name


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _short(messages: Sequence[Published]) -> list[str]:
    lines = [_cut(str(message)) for message in messages[:SHOWN]]
    return [*lines, f"and {len(messages) - SHOWN} more"] if len(messages) > SHOWN else lines


def _cut(text: str) -> str:
    return text if len(text) <= MAX_WIDTH else f"{text[: MAX_WIDTH - 1]}…"
