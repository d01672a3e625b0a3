"""Check-backs about half messages, and their answers."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _


class CheckBack(models.Model):
    """A check-back: one question of a broker, and its answer. Repetitions of a request share a row, because of `request_id`."""

    id = models.BigAutoField(primary_key=True)
    request_id = models.TextField(unique=True)
    asked_by = models.TextField()  # endpoint, broker, command, admin
    topic = models.TextField(_("topic"))
    message_id = models.TextField(db_index=True)
    half_id = models.TextField()
    token = models.TextField(default="")
    asked = models.IntegerField(default=1)  # how often the broker has asked about this half message, including this time
    answer = models.TextField()  # the decided answer
    sent_answer = models.TextField(default="")  # the answer that was sent instead; empty: the decided answer was sent
    reason = models.TextField()
    about = models.TextField(default="none")  # the row that the message is about: exists, missing, none (not named or unknown)
    milliseconds = models.FloatField()
    answered_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "outbox_check_back"
        verbose_name = _("check-back")
        verbose_name_plural = _("check-backs")

    @property
    def shown_answer(self) -> str:
        """The decided answer, and the answer that was sent instead, if there is one."""
        return show_answer(self.answer, self.sent_answer)

    def __str__(self) -> str:
        return f"check-back {self.id}"


def show_answer(answer: str, sent_answer: str) -> str:
    """Return a text with the decided answer, and the answer that was sent to the broker if it differs."""
    if not sent_answer:
        return answer
    reason = ": already visible" if (answer, sent_answer) == ("COMMIT", "ROLLBACK") else ""
    return f"{answer}, sent as {sent_answer}{reason}"
