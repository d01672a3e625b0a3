"""A broker that only records the time of each send."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.null_broker import NullBroker
from benchmarks.sent_times import SentTimes
from outbox.brokers.base import Outgoing, SendResult

VARIABLE = "BENCH_SENT_TIMES"  # the file to write them to; where it is missing, as in a Celery worker, none are


class ClockedBroker(NullBroker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._times = SentTimes()

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        for message in messages:
            self._times.note(message.message_id)
        return super().send(messages)

    def close(self) -> None:
        if path := os.environ.get(VARIABLE):
            self._times.write(Path(path))
