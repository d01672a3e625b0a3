"""The shop on the memory broker, without the apps of the embedded broker and of the pipeline, and without what leans on them."""

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS, OUTBOX

INSTALLED_APPS = [app for app in INSTALLED_APPS if app not in ("outbox.embedded", "outbox.pipeline", "project.demo")]
OUTBOX = {
    **{name: value for name, value in OUTBOX.items() if name != "PIPELINE"},
    "BROKERS": {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}},
}
