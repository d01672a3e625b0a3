"""The tests' settings for consumers that are killed: what they held is handed out again soon."""

from datetime import timedelta

from tests.settings import *  # noqa: F403
from tests.settings import OUTBOX

OUTBOX = {**OUTBOX, "CONSUMER": {"INVISIBLE": timedelta(seconds=1)}}
