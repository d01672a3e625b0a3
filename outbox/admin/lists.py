"""
Lists over tables of any size: newest first, never counted completely, and with an index for each page.

A list has pages for its newest `COUNTED` rows; a link at the end leads to older ones (`?before=`). A filter without an index
reads the newest `LOOKED_AT` rows only, says so, and can continue from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import classproperty
from django.utils.translation import gettext_lazy as _

from outbox.admin.text import number

COUNTED = 1000
LOOKED_AT = 10_000

BEFORE = "before"

Unindexed = tuple[Sequence[Any], Any, str]  # primary keys; the keyset below which no row was read, or None; a note that says so


class Pages(Paginator):
    """Pages of the newest rows."""

    @cached_property
    def _found(self) -> int:
        rows: Any = self.object_list[: COUNTED + 1]
        return int(rows.count())

    @cached_property
    def count(self) -> int:
        """Return the number of rows, at most `COUNTED`."""
        return min(self._found, COUNTED)

    @property
    def is_more(self) -> bool:
        """Whether there are older rows than those in the pages."""
        return self._found > COUNTED


class Filter(SimpleListFilter):
    """A filter by a column, by default that of its parameter. `is_indexed`: an index finds its rows."""

    column = ""
    is_indexed = False
    bounds: Mapping[str, Any] = MappingProxyType({})  # the resulting lookups of the keyset

    @classproperty
    def parameter_names(cls) -> Sequence[str | None]:
        return (cls.parameter_name,)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(**{self.column or str(self.parameter_name): self.value()})


class Newest(ChangeList):
    """The newest rows of a table, by the admin's `keyset`, a column with an index."""

    model_admin: Any  # a ReadOnlyAdmin, whose list this is
    floor: Any = None  # no older row than this was read
    note: str = ""  # says so

    def get_filters_params(self, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Reject parameters that are not of a filter, since each could read all rows."""
        filters: dict[str, Any] = super().get_filters_params(params)
        filters.pop(BEFORE, None)
        if set(filters) - {name for spec in self.list_filter for name in spec.parameter_names}:  # type: ignore[union-attr]
            raise IncorrectLookupParameters
        return filters

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Order by the keyset, whatever the URL says."""
        return [f"-{self.model_admin.keyset}"]

    def get_queryset(self, request: HttpRequest, exclude_parameters: list[str | None] | None = None) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request, exclude_parameters)
        if any("\x00" in value for values in request.GET.lists() for value in values[1]):
            return rows.none()  # PostgreSQL's texts hold no NUL
        bounds = self._bounds
        needs_all_rows = not self.query and any(spec.value() is not None and not spec.is_indexed for spec in self.filter_specs)  # type: ignore[attr-defined]
        if needs_all_rows and not self.model_admin.is_small:
            keyset = self.model_admin.keyset
            read = self.root_queryset.filter(**bounds).order_by(f"-{keyset}").values_list(keyset, flat=True)
            self.floor = next(iter(read[LOOKED_AT : LOOKED_AT + 1]), None)
            if self.floor is not None:
                bounds[f"{keyset}__gte"] = self.floor  # found within the bounds, so not lower than these
                self.note = _("No index serves this filter: only the newest {} rows were looked at.").format(number(LOOKED_AT))
        if self.query and (unindexed := self.model_admin.search_unindexed(request, self.query, bounds)) is not None:
            pks, self.floor, self.note = unindexed
            rows = rows.filter(pk__in=pks)
        narrowed: QuerySet[Any] = self.model_admin.narrow(rows.filter(**bounds), request, bounds)
        return narrowed

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = list(self.result_list)
        self.model_admin.complete(request, self.result_list)

    @property
    def before(self) -> Any:
        """Where the list begins; None: at the newest row."""
        return self._before

    @property
    def newest_url(self) -> str:
        return self.get_query_string(remove=[BEFORE, "p"])

    @property
    def older_url(self) -> str:
        """The URL of older rows; empty where there are none."""
        if self.paginator.is_more and self.page_num == self.paginator.num_pages and self.result_list:
            last = getattr(self.result_list[-1], self.model_admin.keyset)
        elif self.floor is not None and not self.paginator.is_more:
            last = self.floor
        else:
            return ""
        text = last.isoformat() if hasattr(last, "isoformat") else str(last)
        return self.get_query_string({BEFORE: text}, remove=["p"])

    @property
    def _bounds(self) -> dict[str, Any]:
        """The bounds of the keyset, from the time filter and from `?before=`."""
        bounds = {name: bound for spec in self.filter_specs for name, bound in spec.bounds.items()}  # type: ignore[attr-defined]
        if self._before is not None:
            older = f"{self.model_admin.keyset}__{self.model_admin.older}"
            bounds[older] = min(self._before, bounds.get(older, self._before))
        return bounds

    @cached_property
    def _before(self) -> Any:
        text = self.params.get(BEFORE)
        if text is None:
            return None
        try:
            field: Any = self.lookup_opts.get_field(self.model_admin.keyset)
            value = field.to_python(text)
            if not isinstance(value, datetime):
                return value
            # In UTC: PostgreSQL reads no offset of 16 hours or more.
            return (timezone.make_aware(value) if timezone.is_naive(value) else value).astimezone(UTC)
        except (ValidationError, OverflowError, ValueError) as error:
            raise IncorrectLookupParameters from error
