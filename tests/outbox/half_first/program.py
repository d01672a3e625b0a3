"""
Make a group, half first, in a process of its own: `python -m tests.outbox.half_first.program DATABASE OUTBOX`.

Where it is killed, `OUTBOX_FAILPOINTS` says.
"""

import json
import os
import sys

import django
from django.conf import settings

if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.process_settings"
    settings.DATABASES["default"]["NAME"] = sys.argv[1]
    settings.OUTBOX = json.loads(sys.argv[2])
    django.setup()

    from tests.outbox.half_first.orders import make_group

    make_group()
