"""The filter of dead letters by group, topic, error and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest

from outbox.admin.text import moment, shown
from outbox.admin.times import NAMES, SPANS, TimeRange
from outbox.consuming.dead_letters import Letter, group_letters


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """
    What was asked for; empty texts: any.

    Args:
        error: a fingerprint, all of it.
    """

    group: str
    topic: str
    error: str
    times: TimeRange

    @classmethod
    def of(cls, request: HttpRequest) -> LetterFilter:
        """Read the filter from the URL. Raises IncorrectLookupParameters for an invalid time."""
        group, topic, error = (request.GET.get(name, "") for name in ("group", "topic", "error"))
        return cls(group, topic, error, TimeRange.of({name: request.GET.get(name, "") for name in NAMES}))

    def takes(self, one: Letter) -> bool:
        """Return whether a letter matches."""
        letter = one.letter
        return (
            self.group in ("", letter.group)
            and self.topic in ("", letter.topic)
            and self.error in ("", one.fingerprint)
            and self.times.holds(letter.died_at)
        )

    def kinds(self, letters: Sequence[Letter]) -> list[dict[str, Any]]:
        """Return the number of letters by group, topic and error, each with a URL."""
        return [
            {
                "group": one.group,
                "topic": one.topic,
                "count": one.count,
                "first": moment(one.first_at),
                "last": moment(one.last_at),
                "error": shown(one.fingerprint),
                "url": self._url(group=one.group, topic=one.topic, error=one.fingerprint),
            }
            for one in group_letters(letters)
        ]

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The choices of the time filter."""
        chosen = self.times.texts.get("since", "")
        return [{"name": name, "is_chosen": name == chosen} for name in SPANS]

    @property
    def page_url(self) -> str:
        """The URL of a page without its number."""
        return f"{self._url()}&p=" if self._url() else "?p="

    def _url(self, **more: str) -> str:
        texts = {"group": self.group, "topic": self.topic, "error": self.error, **self.times.texts, **more}
        given = {name: text for name, text in texts.items() if text}
        return f"?{urlencode(given)}" if given else ""
