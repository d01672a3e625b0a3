"""The settings of relays that are processes: the test's own database, since nobody makes another for them."""

from tests.process_settings import *  # noqa: F403
from tests.process_settings import DATABASES

del DATABASES["other"]
