"""The settings of a soak's processes."""

from tests.journeys.settings import *  # noqa: F403
from tests.journeys.settings import INSTALLED_APPS
from tests.journeys.soak import days  # noqa: F401
from tests.journeys.soak.given import given, outbox

INSTALLED_APPS = [*(app for app in INSTALLED_APPS if not app.startswith("outbox.pipeline")), "tests.journeys.soak"]
DEBUG = False  # with it, Django keeps the statements of a connection
OUTBOX = outbox(given)
