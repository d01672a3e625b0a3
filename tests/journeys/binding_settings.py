"""The shop's settings, on a connection that binds on the server and prepares each statement, even its first time."""

from project.settings import *  # noqa: F403
from project.settings import DATABASES

DATABASES["default"]["OPTIONS"] = {**DATABASES["default"]["OPTIONS"], "server_side_binding": True, "prepare_threshold": 0}
