"""A mixin for a project's own admin: it shows the messages about a row on the row's page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.db import router
from django.db.models import Model
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox import database
from outbox.admin.links import message_link
from outbox.admin.pages import may_see, url_of
from outbox.admin.state_badges import state_badges
from outbox.admin.text import moment, shown
from outbox.consuming.acts import read_group_states
from outbox.models import MessageRow
from outbox.monitoring.find import find_about, read_found
from outbox.publishing.transactions import describe

NAME = "messages_about"
SHOWN = 20

if TYPE_CHECKING:
    Base = admin.ModelAdmin
else:
    Base = object


class MessagesAboutMixin(Base):
    """
    Show the newest 20 messages about a row (`publish(..., about=order)`) on the row's page, each with a link to its own page.

    Put the mixin before the other bases: `class OrderAdmin(MessagesAboutMixin, admin.ModelAdmin)`. The messages are the last
    field of the page, unless `fields` or `fieldsets` name `messages_about`. Users who may not view messages do not see them.
    """

    @property
    def media(self) -> forms.Media:
        return super().media + forms.Media(css={"all": ["outbox/admin.css"]})

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return [*fields, NAME] if self._shows_messages(request, obj) else fields

    def get_fieldsets(self, request: HttpRequest, obj: Model | None = None) -> Any:
        fieldsets = super().get_fieldsets(request, obj)
        if not self._shows_messages(request, obj):
            return [(title, {**options, "fields": _without(options["fields"])}) for title, options in fieldsets]
        return fieldsets if NAME in flatten_fieldsets(fieldsets) else [*fieldsets, (None, {"fields": [NAME]})]

    @admin.display(description=_("messages"))
    def messages_about(self, row: Model) -> SafeString:
        """Return the messages about a row as a table."""
        alias = _database_of(row)
        connection = database.raw(alias)
        about = find_about(connection, row, alias, limit=SHOWN)
        ended = read_group_states(about.ids, alias)
        has_pages = alias == router.db_for_write(MessageRow)
        rows = [
            {
                "link": message_link(self.admin_site, message.id) if has_pages else shown(str(message.id)),
                "published": moment(message.created_at),
                "state": state_badges(message.state, ended.get(message.id, [])),
                "topic": shown(message.topic, 60),
                "type": shown(message.type, 60),
            }
            for message in read_found(connection, about.ids)
        ]
        query = urlencode({"q": describe(row, alias)})
        all_url = f"{url_of(self.admin_site, 'outbox_messagerow_changelist')}?{query}" if has_pages else ""
        context = {"rows": rows, "is_cut": about.is_cut, "all_url": all_url}
        return render_to_string("admin/outbox/_about.html", context)

    def _shows_messages(self, request: HttpRequest, obj: Model | None) -> bool:
        if obj is None or not may_see(self.admin_site, MessageRow, request):
            return False
        return database.is_outbox_database(_database_of(obj))


def _database_of(row: Model) -> str:
    """Return the alias of the database with the messages about a row."""
    return router.db_for_write(row._meta.model, instance=row)


def _without(fields: Any) -> list[Any]:
    """Return the fields of a fieldset without the messages. Fields in a tuple are shown in one line."""
    lines = [[field for field in line if field != NAME] if isinstance(line, list | tuple) else line for line in fields]
    return [line for line in lines if line not in ([], NAME)]
