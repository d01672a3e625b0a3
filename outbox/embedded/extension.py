"""The link that the embedded broker adds to the top of the admin pages of the outbox."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from outbox.embedded.models import EmbeddedHalf
from outbox.extensions import Extension, Page


class EmbeddedExtension(Extension):
    pages = (Page(50, _("Half messages"), EmbeddedHalf, "outbox_embedded_embeddedhalf_changelist"),)
