"""What the storm's processes are told by their environment."""

import json
import os
from typing import Any

VARIABLE = "CELERY_STORM"

given: dict[str, Any] = json.loads(os.environ.get(VARIABLE, '{"read": "memory://", "write": "memory://"}'))

GOOD, POISON = "good", "poison"  # queues

POISON_TYPE = "no-such-type"
