"""The settings of a journey's processes, which each journey adds its own to: one database, and no shop."""

from tests.process_settings import *  # noqa: F403
from tests.process_settings import DATABASES, INSTALLED_APPS

del DATABASES["other"]
INSTALLED_APPS = [app for app in INSTALLED_APPS if not app.startswith("project.")]
ROOT_URLCONF = None
