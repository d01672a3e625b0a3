"""What the pipeline adds to other parts of the outbox; called by its `AppConfig.ready()`."""

from __future__ import annotations

from outbox.database import retention_holds
from outbox.monitoring import attention
from outbox.pipeline.archive import HOLD
from outbox.pipeline.attention import find
from outbox.pipeline.checks import register_checks
from outbox.pipeline.recorder import PAST_RETENTION
from outbox.relay.maintenance import register_table


def register_all() -> None:
    """Register the audit's findings as attention, the system checks, the archive's retention hold, and the recorder's table."""
    attention.register(find)
    register_checks()
    retention_holds.register(HOLD)
    register_table("outbox_recorded", PAST_RETENTION)
