"""The Django app of the embedded broker: its tables and its page in the admin."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class EmbeddedBrokerConfig(AppConfig):
    name = "outbox.embedded"
    label = "outbox_embedded"
    verbose_name = _("Outbox embedded broker")
    default_auto_field = "django.db.models.BigAutoField"
    outbox_extension = "outbox.embedded.extension.EmbeddedExtension"
