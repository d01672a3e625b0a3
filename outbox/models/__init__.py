"""Tables of the outbox. `MessageRow` is the stored message, `outbox.Message` the type of what travels."""

from outbox.models.batch import UNFINISHED, Batch, DeadMessage, FailedAttempt, Lane, Process, State
from outbox.models.check_back import CheckBack
from outbox.models.inbox import DeadLetter, Duplicate, FailedDelivery, Gap, Inbox, InboxRow, Tries
from outbox.models.message import Dedupe, Delayed, MessageRow, MessageState, Overview, Ticket, Topic

__all__ = [
    "UNFINISHED",
    "Batch",
    "CheckBack",
    "DeadLetter",
    "DeadMessage",
    "Dedupe",
    "Delayed",
    "Duplicate",
    "FailedAttempt",
    "FailedDelivery",
    "Gap",
    "Inbox",
    "InboxRow",
    "Lane",
    "MessageRow",
    "MessageState",
    "Overview",
    "Process",
    "State",
    "Ticket",
    "Topic",
    "Tries",
]
