"""The shop's settings for the demo's processes. Times are shorter than a shop's, so that a day passes in half a minute."""

import os
from datetime import timedelta

from project.settings import *  # noqa: F403
from project.settings import OUTBOX as SHOP_OUTBOX

# A relay that dies after its decision leaves half messages. Here the broker asks about them long before another relay
# would end them in its sweep, so that the check-back endpoint decides.
OUTBOX = {
    **SHOP_OUTBOX,
    "BROKERS": {
        "default": {
            "BACKEND": "outbox.brokers.embedded.EmbeddedBroker",
            "OPTIONS": {
                "DATABASE": "default",
                "CHECK_AFTER": timedelta(seconds=1),
                "CHECK_INTERVAL": timedelta(seconds=2),
            },
        }
    },
    "RELAY": {"SWEEP_AGE": timedelta(seconds=10)},
    "CONSUMER": {"INVISIBLE": timedelta(seconds=3)},  # what a killed consumer held comes back after that time
    "CHECK_BACK": {"URL": os.environ.get("DEMO_CHECK_BACK_URL", ""), "SECRETS": os.environ.get("DEMO_SECRET", "").split()},
}
