"""
Publishes messages as a release does, each in a transaction of its own: `python -m tests.journeys.deploys.publisher`.

The variable MESSAGES lists type, number, key and tag of each.
"""

import json
import os

import django

django.setup()

from outbox import atomic, publish  # noqa: E402
from tests.journeys.deploys.consumers import TYPES  # noqa: E402


def main() -> None:
    """Publish all."""
    for type_, number, key, tag in json.loads(os.environ["MESSAGES"]):
        with atomic():
            publish(TYPES[type_](number=number), key=key, tag=tag)


if __name__ == "__main__":
    main()
