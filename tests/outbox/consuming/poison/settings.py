"""Settings of processes that run the poisoned handler."""

import os

from tests.outbox.consuming.settings import *  # noqa: F403
from tests.outbox.consuming.settings import OUTBOX
from tests.process_settings import INSTALLED_APPS

OUTBOX = {**OUTBOX, "CONSUMER": {**OUTBOX["CONSUMER"], "BATCH_SIZE": int(os.environ.get("BATCH_SIZE", 32))}}
INSTALLED_APPS = [*INSTALLED_APPS, "tests.outbox.consuming.poison"]
