"""What the shop needs at a RocketMQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from outbox import conf
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.options import parse_address
from outbox.brokers.rocketmq.remoting.frames import RemotingError
from outbox.brokers.rocketmq.settlement import ORDERED
from outbox.consuming.register import groups
from outbox.message import TopicSpec, TopicType
from project.servers.rocketmq_admin import brokers_of, make_group, make_topic

ALIAS = "default"


class Command(BaseCommand):
    help = (
        "Create at RocketMQ what the shop needs: its topics with their types, its consumers' groups. What is there stays. "
        "Each broker that ROCKETMQ_NAME_SERVERS know gets all of it."
    )

    def handle(self, **options: Any) -> None:
        if not issubclass(conf.broker_class(ALIAS), RocketMQBroker):
            raise CommandError("The shop's broker is another one. Set BROKER=rocketmq in the environment.")
        name_server = conf.settings().brokers[ALIAS].options["NAME_SERVERS"][0]
        place = f"name server {name_server}"
        try:
            for place in brokers_of(parse_address(name_server)):
                self._create(place)
        except (OSError, RemotingError) as error:
            raise CommandError(f"{place}: {error}") from error

    def _create(self, place: str) -> None:
        for topic in needed_topics():
            make_topic(parse_address(place), topic.name, topic.type, topic.queues)
            self.stdout.write(f"{place} has topic {topic.name}, {topic.type}")
        for name, is_ordered in needed_groups():
            make_group(parse_address(place), name, is_ordered=is_ordered)
            self.stdout.write(f"{place} has group {name}{', in order' if is_ordered else ''}")


def needed_topics() -> list[TopicSpec]:
    """List the topics that settings give to the broker."""
    return conf.topics_of(ALIAS)


def needed_groups() -> Iterator[tuple[str, bool]]:
    """List the groups of the project's consumers, and whether each keeps order: topics of type fifo have their own."""
    kinds = {topic.name: topic.type for topic in needed_topics()}
    for group in groups().values():
        for is_ordered in sorted({kinds[topic] is TopicType.FIFO for topic in group.topics_of(ALIAS)}):
            yield f"{group.name}{ORDERED}" if is_ordered else group.name, is_ordered
