"""The time filter of lists: the last hour, day or week, or a range."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from django.contrib.admin import ListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext_lazy as _

from outbox.admin.text import Text
from outbox.ids import first_id_at

# The order of rows by id may differ slightly from the order by time, since an id is assigned before the time of its row. Bounds
# of ids are wider than the range by this.
SLACK = timedelta(minutes=1)

FIRST_YEAR, LAST_YEAR = 1971, 9998  # years for which every time zone has times in ids, and in Python

NAMES = ("since", "from", "to")
SPAN_NAMES = {"hour": _("The last hour"), "day": _("The last day"), "week": _("The last week")}
SPANS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7)}


class Time(enum.Enum):
    """The relation of a list's keyset to the time of its rows."""

    ANY = enum.auto()  # unrelated
    KEYSET = enum.auto()  # the keyset is the time
    IN_IDS = enum.auto()  # the keyset is an id that begins with the time
    BESIDE_IDS = enum.auto()  # the keyset is an id that increases with the time, and the time has an index


def _time(text: str) -> datetime | None:
    if not text:
        return None
    try:
        at = parse_datetime(text)
        if at is not None:  # PostgreSQL rejects time zone offsets of 16 hours or more, so convert to UTC
            at = (timezone.make_aware(at) if timezone.is_naive(at) else at).astimezone(UTC)
    except (ValueError, OverflowError):
        at = None
    if at is None or not FIRST_YEAR <= at.year <= LAST_YEAR:
        raise IncorrectLookupParameters
    return at


class TimeFilter(ListFilter):
    """
    Filter by the column `time` of a `ReadOnlyAdmin`, with the parameters `since` (hour, day, week), `from` and `to`.

    If the list is ordered by that column, or by ids that begin with the time, the range becomes bounds of the list's keyset.
    """

    title = _("time")
    template = "admin/outbox/time_filter.html"
    parameter_names = NAMES

    def __init__(self, request: HttpRequest, params: dict[str, Any], model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        self.texts = {name: str(params.pop(name)[-1]) for name in NAMES if name in params}
        self.used_parameters.update(self.texts)
        self.begin, self.end = _time(self.texts.get("from", "")), _time(self.texts.get("to", ""))
        if self.begin is None and (since := self.texts.get("since")):
            if since not in SPANS:
                raise IncorrectLookupParameters
            self.begin = timezone.now() - SPANS[since]
        self.column: str = model_admin.time
        self.keyset: str = model_admin.keyset
        self.time_is: Time = model_admin.time_is
        self.rows: QuerySet[Any] = model_admin.get_queryset(request)

    def has_output(self) -> bool:
        return True

    def expected_parameters(self) -> list[str | None]:
        return [*NAMES]

    def value(self) -> str | None:
        return " ".join(filter(None, self.texts.values())) or None

    @property
    def is_indexed(self) -> bool:
        return self.time_is is not Time.ANY

    @cached_property
    def bounds(self) -> dict[str, Any]:
        """The range as bounds of the keyset; empty if the keyset is unrelated to the time."""
        match self.time_is:
            case Time.KEYSET:
                return self._lookups(self.keyset)
            case Time.IN_IDS:
                return {name: first_id_at(at) for name, at in self._lookups(self.keyset).items()}
            case Time.BESIDE_IDS:
                return self._find_ids()
            case _:
                return {}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        is_exact = self.time_is in (Time.KEYSET, Time.IN_IDS)
        return queryset if is_exact else queryset.filter(**self._lookups(self.column))

    def _lookups(self, column: str) -> dict[str, datetime]:
        """Return the range as lookups of a column: at or after `begin`, and before `end`; without a lookup for a missing end."""
        bounds = {f"{column}__gte": self.begin, f"{column}__lt": self.end}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def _find_ids(self) -> dict[str, Any]:
        """Return bounds of ids for both ends of the range, a little wider than it, found with the index of the time."""
        bounds: dict[str, Any] = {}
        for name, at, slack in (("gte", self.begin, -SLACK), ("lt", self.end, SLACK)):
            if at is not None:
                later = self.rows.filter(**{f"{self.column}__gte": at + slack}).order_by(self.column)
                if (first := later.values_list(self.keyset, flat=True).first()) is not None:
                    bounds[f"{self.keyset}__{name}"] = first
                elif name == "gte":
                    bounds[f"{self.keyset}__in"] = []
        return bounds

    def choices(self, changelist: Any) -> Iterator[dict[str, Any]]:
        def link(text: Text, since: str | None) -> dict[str, Any]:
            url = changelist.get_query_string({"since": since}, ["from", "to", "before", "p"])
            return {"display": text, "query_string": url, "selected": self.value() == since}

        yield link(_("Any time"), None)
        yield from (link(text, name) for name, text in SPAN_NAMES.items())

    def kept(self) -> list[tuple[str, str]]:
        """Return the parameters of the other filters, which the form has to send again."""
        dropped = {*NAMES, "before", "p"}
        return [(name, value) for name, values in self.request.GET.lists() if name not in dropped for value in values]
