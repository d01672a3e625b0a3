"""Tables of the outbox. `MessageRow` is the stored message; `outbox.Message` is the base of message types."""

from outbox.models.batch import UNFINISHED, Batch, DeadMessage, FailedSend, Lane, Process, State
from outbox.models.check_back import CheckBack
from outbox.models.inbox import Deferred, Duplicate, FailedDelivery, Gap, Inbox, InboxRow
from outbox.models.message import Delayed, IdempotencyKey, MessageRow, MessageState, Overview, Ticket, Topic
from outbox.models.operator_act import Act, OperatorAct

__all__ = [
    "UNFINISHED",
    "Act",
    "Batch",
    "CheckBack",
    "DeadMessage",
    "Deferred",
    "Delayed",
    "Duplicate",
    "FailedDelivery",
    "FailedSend",
    "Gap",
    "IdempotencyKey",
    "Inbox",
    "InboxRow",
    "Lane",
    "MessageRow",
    "MessageState",
    "OperatorAct",
    "Overview",
    "Process",
    "State",
    "Ticket",
    "Topic",
]
