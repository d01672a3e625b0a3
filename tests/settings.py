"""The shop's settings, with a second database for tests of several databases."""

from project.settings import *  # noqa: F403
from project.settings import DATABASES

DATABASES["other"] = {**DATABASES["default"], "NAME": f"{DATABASES['default']['NAME']}_other"}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
