"""The tests' settings for consumers that are killed: what they held is handed out again soon."""

from datetime import timedelta

from tests.process_settings import *  # noqa: F403
from tests.process_settings import OUTBOX

OUTBOX = {**OUTBOX, "CONSUMER": {"INVISIBLE": timedelta(seconds=1)}}
