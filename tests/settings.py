"""The shop's settings, with a second database for tests of several databases."""

from project.settings import *  # noqa: F403
from project.settings import DATABASES, OUTBOX

DATABASES["default"]["CONN_MAX_AGE"] = 0  # no thread keeps a connection to a database that is to be dropped
DATABASES["other"] = {**DATABASES["default"], "NAME": f"{DATABASES['default']['NAME']}_other"}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
OUTBOX = {**OUTBOX, "CELERY_WAKEUP": False}  # no test's commit leaves a Celery task behind
