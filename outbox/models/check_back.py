"""Check-backs about half messages, and their answers."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _


class CheckBack(models.Model):
    """One question of a broker and our answer. `request_id` makes a replayed request visible."""

    id = models.BigAutoField(primary_key=True)
    request_id = models.TextField(unique=True)
    asked_by = models.TextField()  # the door: endpoint, broker, command, admin
    topic = models.TextField(_("topic"))
    message_id = models.TextField(db_index=True)
    half_id = models.TextField()
    token = models.TextField(default="")
    asked = models.IntegerField(default=1)
    answer = models.TextField()  # the decision
    sent_answer = models.TextField(default="")  # the answer sent instead; empty: the decision
    reason = models.TextField()
    about = models.TextField(default="none")  # exists, missing, none
    milliseconds = models.FloatField()
    answered_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "outbox_check_back"
        verbose_name = _("check-back")
        verbose_name_plural = _("check-backs")

    @property
    def shown_answer(self) -> str:
        """The decision, and the answer that was sent instead."""
        return show_answer(self.answer, self.sent_answer)

    def __str__(self) -> str:
        return f"check-back {self.id}"


def show_answer(answer: str, sent_answer: str) -> str:
    """Put into words what was decided, and what the broker was sent instead, where that differs."""
    if not sent_answer:
        return answer
    why = ": already visible" if (answer, sent_answer) == ("COMMIT", "ROLLBACK") else ""
    return f"{answer}, sent as {sent_answer}{why}"
