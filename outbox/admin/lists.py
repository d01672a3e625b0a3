"""
Lists over tables of any size: newest first, never counted completely, each page read along an index.

A list has pages for its newest `MAX_COUNTED` rows; a link at the end leads to older rows (`?before=`). A filter without an index
reads only the newest `MAX_READ` rows; then the page says so, and has a link to continue with older rows.
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

MAX_COUNTED = 1000
MAX_READ = 10_000

BEFORE = "before"

# The result of a search without an index: the primary keys that were found; the value of the keyset below which no row was read,
# None if all were read; and a text about that for the page.
UnindexedResult = tuple[Sequence[Any], Any, str]


class LimitedPaginator(Paginator):
    """Pages of the newest `MAX_COUNTED` rows."""

    @cached_property
    def _found(self) -> int:
        rows: Any = self.object_list[: MAX_COUNTED + 1]
        return int(rows.count())

    @cached_property
    def count(self) -> int:
        """Return the number of rows, at most `MAX_COUNTED`."""
        return min(self._found, MAX_COUNTED)

    @property
    def is_more(self) -> bool:
        """Whether there are older rows than the pages show."""
        return self._found > MAX_COUNTED


class Filter(SimpleListFilter):
    """A filter by a column, by default the one named like the parameter. `is_indexed`: whether an index finds the rows."""

    column = ""
    is_indexed = False
    bounds: Mapping[str, Any] = MappingProxyType({})  # lookups of the list's keyset that follow from the filter's value

    @classproperty
    def parameter_names(cls) -> Sequence[str | None]:
        return (cls.parameter_name,)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(**{self.column or str(self.parameter_name): self.value()})


class NewestFirst(ChangeList):
    """The newest rows of a table, in the order of the admin's `keyset`, a column with an index."""

    model_admin: Any  # the ReadOnlyAdmin of the list
    floor: Any = None  # the keyset value of the oldest row that was read, if older rows were not; otherwise None
    note: str = ""  # a text for the page that says so

    def get_filters_params(self, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Reject parameters that belong to no filter, since such a lookup may read all rows."""
        filters: dict[str, Any] = super().get_filters_params(params)
        filters.pop(BEFORE, None)
        if set(filters) - {name for spec in self.list_filter for name in spec.parameter_names}:  # type: ignore[union-attr]
            raise IncorrectLookupParameters
        return filters

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return the keyset as the order, and ignore the order that the URL asks for."""
        return [f"-{self.model_admin.keyset}"]

    def get_queryset(self, request: HttpRequest, exclude_parameters: list[str | None] | None = None) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request, exclude_parameters)
        if any("\x00" in value for values in request.GET.lists() for value in values[1]):
            return rows.none()  # no text in PostgreSQL contains NUL, and a query with one fails
        bounds = self._bounds
        needs_all_rows = not self.query and any(spec.value() is not None and not spec.is_indexed for spec in self.filter_specs)  # type: ignore[attr-defined]
        if needs_all_rows and not self.model_admin.is_small:
            keyset = self.model_admin.keyset
            read = self.root_queryset.filter(**bounds).order_by(f"-{keyset}").values_list(keyset, flat=True)
            self.floor = next(iter(read[MAX_READ : MAX_READ + 1]), None)
            if self.floor is not None:
                bounds[f"{keyset}__gte"] = self.floor  # replaces the lower bound of the filters, which is not above it
                self.note = _("No index serves this filter: only the newest {} rows were read.").format(number(MAX_READ))
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
        """The keyset value of `?before=`, at which the list begins; None if it begins at the newest row."""
        return self._before

    @property
    def newest_url(self) -> str:
        return self.get_query_string(remove=[BEFORE, "p"])

    @property
    def older_url(self) -> str:
        """The URL of older rows; "" if there are none."""
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
            # PostgreSQL rejects time zone offsets of 16 hours or more, so convert to UTC.
            return (timezone.make_aware(value) if timezone.is_naive(value) else value).astimezone(UTC)
        except (ValidationError, OverflowError, ValueError) as error:
            raise IncorrectLookupParameters from error
