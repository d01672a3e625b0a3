"""What a release is told by its environment."""

import json
import os
from typing import Any

VARIABLE = "DEPLOYED_RELEASE"

given: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
