"""What the processes of a situation are told by their environment."""

import json
import os
from typing import Any

VARIABLE = "SITUATION"

given: dict[str, Any] = {
    "broker": "embedded",  # or "rabbitmq" with `nodes`, `user`, `virtual_host` and `max_length`
    "celery": "",  # URL of the server of Celery's tasks
    "wakeup": False,  # whether commits send wakeups to Celery
    "consumes": [],  # groups that Celery's beat starts
    "topics": ["orders", "refunds"],
    "groups": ["shipping"],
    "handles": ["orders", "refunds"],  # topics that the groups have handlers of
    "mended": False,  # whether no message fails or hangs
    **json.loads(os.environ.get(VARIABLE, "{}")),
}
