"""Starts the program, on the test's database."""

import json
import os
import subprocess
import sys
from typing import Any

from django.conf import settings
from django.db import connections

from outbox.failpoints import VARIABLE

PROGRAM = "tests.outbox.half_first.program"

PLACES = {
    "half_first.after_prepare": False,
    "half_first.after_half": False,
    "half_first.after_work": False,
    "half_first.after_commit": True,
    "half_first.after_end": True,
}
"""Each step of the order, and whether the database has committed by then."""


def start(outbox: dict[str, Any], plan: str) -> subprocess.Popen[bytes]:
    """Start the program with failpoints set."""
    name = connections["default"].settings_dict["NAME"]
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM, name, json.dumps(outbox)],
        cwd=settings.BASE_DIR,
        env={**os.environ, VARIABLE: plan},
    )
