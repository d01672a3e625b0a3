"""Make texts from messages and errors fit for pages: escaped, truncated, and with control characters made visible."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe

from outbox.database import aware
from outbox.monitoring.text import age

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise

Text: TypeAlias = "_StrOrPromise"  # a text of the outbox itself, which may be translated

TITLE_CHARACTERS = 2_000

# Control characters, invisible characters, and characters that change the direction of text.
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """Return a text with its control characters made visible, but not escaped: the caller has to do that."""
    return _ODD.sub(lambda odd: f"[U+{ord(odd.group()):04X}]", text)


def shown(text: str, limit: int | None = None) -> SafeString:
    """Return a text as HTML; if it is truncated to `limit` characters, its tooltip has up to 2,000."""
    if not text:
        return SafeString("")
    is_cut = limit is not None and len(text) > limit
    marked = _ODD.sub(_mark, escape(f"{text[:limit]}…" if is_cut else text))
    title = f' title="{escape(plain(text[:TITLE_CHARACTERS]))}"' if is_cut else ""
    return mark_safe(f"<bdi{title}>{marked}</bdi>")  # noqa: S308  (escaped above)


def _mark(odd: re.Match[str]) -> str:
    return f'<span class="outbox-odd">U+{ord(odd.group()):04X}</span>'


def number(value: float, decimals: int = 0) -> str:
    """Return a number rounded to `decimals` places, with the digit grouping of the language."""
    return number_format(round(value, decimals), decimals, force_grouping=True)


def moment(at: datetime | None) -> SafeString:
    """Return a time to the second, in one line."""
    return format_html('<span class="outbox-time">{}</span>', date_format(local(at), "Y-m-d H:i:s") if at else "")


def since(at: datetime | None) -> str:
    """Return the age of a time as text: 12 s, 3 min."""
    return "" if at is None else age(max(timedelta(), datetime.now(UTC) - aware(at)).total_seconds())


def local(at: datetime) -> datetime:
    """Return a time in the current time zone."""
    return timezone.localtime(aware(at))


def badge(text: Text, tone: str) -> SafeString:
    """Return a word as a coloured badge. Tones: good, bad, waiting, plain."""
    return format_html('<span class="outbox-badge outbox-{}">{}</span>', tone, text)
