"""The shop behind PgBouncer, for processes of their own: DATABASE_URL leads through it, DIRECT_DATABASE_URL around it."""

import os

import dj_database_url

from project.settings import *  # noqa: F403
from project.settings import DATABASES, OUTBOX

DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"] = True
del DATABASES["default"]["OPTIONS"]["prepare_threshold"]
OUTBOX = {**OUTBOX, "CELERY_WAKEUP": False}
if "DIRECT_DATABASE_URL" in os.environ:
    DATABASES["direct"] = dj_database_url.config("DIRECT_DATABASE_URL")
    DATABASES["direct"]["HOST"] = DATABASES["direct"]["OPTIONS"].pop("host")
    OUTBOX["DIRECT_DATABASES"] = {"default": "direct"}
