"""Links from one page of the admin to another."""

from __future__ import annotations

from uuid import UUID

from django.apps import apps
from django.contrib.admin import AdminSite
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.urls import NoReverseMatch
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from outbox.admin.pages import may_see, url_of
from outbox.admin.text import shown


def message_link(site: AdminSite, message_id: object, *, short: bool = True) -> SafeString:
    """Return a link to a message, with a shortened id if `short`; an id that is no UUID, of another producer, gets no link."""
    text = str(message_id)
    try:
        url = url_of(site, "outbox_messagerow_change", UUID(text))
    except (ValueError, NoReverseMatch):
        return shown(text, 60)
    name = f"{text[:13]}…{text[-6:]}" if short else text
    return format_html('<a class="outbox-id" href="{}" title="{}">{}</a>', url, text, name)


def about_link(site: AdminSite, request: HttpRequest, about: str) -> SafeString:
    """
    Return a link to the row that a message is about (`shop.order:4711`), if the admin has a page for it and the user may see it.

    Other users see the text only, and do not learn whether the row still exists.
    """
    label, _separator, key = about.partition(":")
    try:
        model = apps.get_model(label)
        if not may_see(site, model, request):
            return shown(about)
        if not model._default_manager.filter(pk=key).exists():
            return format_html(_("{} (it is gone)"), shown(about))
        url = url_of(site, f"{model._meta.app_label}_{model._meta.model_name}_change", key)
        return format_html('<a href="{}">{}</a>', url, shown(about))
    except (LookupError, ValueError, TypeError, ValidationError, NoReverseMatch):
        return shown(about)
