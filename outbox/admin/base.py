"""The base of all admins of the outbox. They are read-only: no row is added, changed or deleted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from outbox.admin.lists import Filter, LimitedPaginator, NewestFirst, UnindexedResult
from outbox.admin.pages import frame, topics
from outbox.admin.text import Text
from outbox.admin.times import Time, TimeFilter


class ReadOnlyAdmin(admin.ModelAdmin):
    """
    Shows rows to those who may view them.

    Attributes:
        keyset: the indexed column by which the list is ordered.
        older: the lookup with which the next page continues after the last row: `lt`; `lte` if the keyset is not unique, so that
            a row may be repeated but none is skipped.
        pages: the available pages of Django's admin: "changelist", "change", "history".
        is_small: whether the table is so small that filters may read all of it.
        time: the column of the time filter; "" for no such filter.
        time_is: how the keyset is related to the time of the time filter.
    """

    keyset = "id"
    older = "lt"
    is_small = False
    time = ""
    time_is = Time.ANY
    pages: tuple[str, ...] = ("changelist",)

    change_list_template = "admin/outbox/change_list.html"  # also for models of other apps, such as outbox.embedded
    paginator = LimitedPaginator
    list_per_page = 100
    sortable_by = ()
    show_facets = admin.ShowFacets.NEVER  # facets would count the rows of every choice of every filter
    show_full_result_count = False

    class Media:
        css = {"all": ["outbox/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def may(self, request: HttpRequest, act: str) -> bool:
        """Return whether the user has a permission for this model, such as "retry"."""
        return bool(request.user.has_perm(f"{self.opts.app_label}.{act}_{self.opts.model_name}"))

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return True, since `NewestFirst` rejects all parameters except those of the filters."""
        return True

    def get_urls(self) -> list[URLPattern]:
        return [url for url in super().get_urls() if url.name and url.name.rpartition("_")[2] in self.pages]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return NewestFirst

    def get_list_filter(self, request: HttpRequest) -> list[Any]:
        return [*super().get_list_filter(request), *([TimeFilter] if self.time else [])]

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[QuerySet[Any], bool]:
        text = search_term.strip()
        return (self.search(queryset, text) if text else queryset), False

    def search(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Return the rows that match a search text exactly."""
        return rows

    def search_unindexed(self, request: HttpRequest, text: str, bounds: dict[str, Any]) -> UnindexedResult | None:
        """
        Return the result of a search for which there is no index, within the bounds of the keyset.

        Return None if an index serves the text: then `search` has filtered the rows already.
        """
        return None

    def narrow(self, rows: QuerySet[Any], request: HttpRequest, bounds: dict[str, Any]) -> QuerySet[Any]:
        """Filter the rows of a list further. The lookups in `bounds` have been applied to them already."""
        return rows

    def complete(self, request: HttpRequest, rows: list[Any]) -> None:
        """Add values from other tables to the rows of a page."""

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        title = capfirst(self.opts.verbose_name_plural)
        framed = {**frame(self.admin_site, request), "title": title, **(extra_context or {})}
        return super().changelist_view(request, framed)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        framed = {**frame(self.admin_site, request), **(extra_context or {})}
        return super().changeform_view(request, object_id, form_url, framed)

    def get_extra_context(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return additional template context for the page of a row, including its title."""
        return {}

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Model | None = None,
    ) -> HttpResponse:
        if more := self.get_extra_context(request, obj):
            context |= {"subtitle": None, **more}
        return super().render_change_form(request, context, add, change, form_url, obj)


class TopicFilter(Filter):
    """Filter by topic, in tables with a column for the name."""

    title = _("topic")
    parameter_name = "topic"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(topic.name, topic.name) for topic in topics(request)]


def choice_filter(column: str, choices: Sequence[str], name: Text) -> type[Filter]:
    """Return a filter by a column with few values, which are shown by their labels if they have labels."""

    class ChoiceFilter(Filter):
        title = name
        parameter_name = column

        def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Text]]:
            return [(str(choice), getattr(choice, "label", choice)) for choice in choices]

    return ChoiceFilter
