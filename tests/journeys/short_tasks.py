"""The shop's settings, where no task may take longer than a few seconds, and no row owes a message."""

from project.settings import *  # noqa: F403
from project.settings import OUTBOX

OUTBOX = {**OUTBOX, "PIPELINE": {"AUDIT": {}}}

CELERY_TASK_SOFT_TIME_LIMIT, CELERY_TASK_TIME_LIMIT = 3, 6
