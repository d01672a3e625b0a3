"""The tests' settings for processes that tests start. None shows the admin's pages, whose loading takes a fifth of the start."""

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [
    "django.contrib.admin.apps.SimpleAdminConfig",
    *(app for app in INSTALLED_APPS if app != "django.contrib.admin"),
]
