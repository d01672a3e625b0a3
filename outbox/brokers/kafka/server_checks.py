"""Checks of the cluster's settings, topics and permissions, for `Broker.check()`. Nothing is created or changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AclOperation, AdminClient, TopicDescription

from outbox.brokers.kafka.client import ANSWER_SECONDS, ConnectionErrors, client_settings, member_settings
from outbox.brokers.kafka.errors import call_error
from outbox.brokers.kafka.marker import ALLOW, marker_topic
from outbox.brokers.kafka.offset_notes import committed_notes, require_owner
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.topics import describe_topics, existing, may, read_settings
from outbox.brokers.owners import NO_OWNER, GroupOwners, OwnedByAnother
from outbox.errors import BrokerMisconfigured
from outbox.findings import Finding, misconfigured, weak

REPLICAS, IN_SYNC = 3, 2  # with fewer, the failure of a broker may lose what was confirmed
STATE = "__transaction_state"  # where Kafka records which transactions are committed
NAMED = 3  # topics that a text names

ONE_NODE = "The cluster has one node: what it has confirmed is lost with its disk, and nothing can be sent while it is down."
ONE_NODE_HINT = "For production, use three nodes or more, replication factor 3 and min.insync.replicas=2."


class KafkaServerChecks:
    """Checks of one cluster, as the user of OPTIONS sees it."""

    def __init__(self, options: KafkaOptions, name: str) -> None:
        self._options = options
        self._name = name

    def problems_of_topics(self, topics: Sequence[str]) -> list[Finding]:
        """Return what is wrong with topics of messages. Raises BrokerUnavailable."""
        nodes = self._count_nodes()
        described = describe_topics(self._options, self._name, topics)
        there = existing(described)
        missing = {topic: description for topic, description in described.items() if isinstance(description, KafkaError)}
        problems = list(_problems_of_missing(missing))
        if denied := [topic for topic, description in there.items() if not may(description, AclOperation.WRITE)]:
            text = f"This user may not write to {_named(denied, 'topic')}."
            problems.append(misconfigured(text, "Allow it Write there. Messages wait meanwhile."))
        if nodes == 1:
            problems.append(weak(ONE_NODE, ONE_NODE_HINT))
        return [*problems, *self._problems_of_durability(there, nodes)]

    def problems_of_groups(self, topics: Mapping[str, Collection[str]], owners: GroupOwners) -> list[Finding]:
        """
        Return what is wrong with the topics and the owners of consumer groups. Raises BrokerUnavailable.

        Args:
            topics: the groups of each topic.
            owners: the outboxes with the inboxes of groups.
        """
        pairs = [(topic, group) for topic, groups in sorted(topics.items()) for group in sorted(groups)]
        there = existing(describe_topics(self._options, self._name, sorted({topic for topic, _ in pairs})))
        problems: list[Finding] = []
        if unread := [topic for topic, description in there.items() if not may(description, AclOperation.READ)]:
            problems.append(misconfigured(f"This user may not read {_named(unread, 'topic')}.", "Allow it Read there."))
        return [*problems, *self._problems_of_owners(pairs, there, owners)]

    def _problems_of_owners(
        self, pairs: Sequence[tuple[str, str]], there: Mapping[str, TopicDescription], owners: GroupOwners
    ) -> Iterator[Finding]:
        for topic, group in pairs:
            ours = owners.get(group)
            if ours is not NO_OWNER and topic in there:
                places = [TopicPartition(topic, number) for number in range(len(there[topic].partitions))]
                with closing(Consumer(member_settings(self._options, self._name, group))) as consumer:
                    try:
                        require_owner(group, committed_notes(consumer, places), ours)
                    except OwnedByAnother as error:
                        yield misconfigured(*error.args)
                    except BrokerMisconfigured as error:
                        yield misconfigured(error.message, error.hint)

    def problems_of_lanes(self, source: str, lanes: int) -> list[Finding]:
        """
        Return what is wrong with the transactions of an outbox. Raises BrokerUnavailable.

        Args:
            source: its stable id.
            lanes: the highest number of a lane.
        """
        topic = marker_topic(source)
        nodes = self._count_nodes()
        described = describe_topics(self._options, self._name, [topic, STATE])
        there = existing(described)
        problems: list[Finding] = []
        marker = described[topic]
        if isinstance(marker, KafkaError):
            if marker.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                problems.append(misconfigured(f"This user may not see the marker topic {topic!r}.", ALLOW))
        else:
            problems += _problems_of_marker(topic, marker, lanes)
        return [*problems, *self._problems_of_durability(there, nodes), *self._problems_of_cleanup(there, topic)]

    def _count_nodes(self) -> int:
        errors = ConnectionErrors()
        admin = AdminClient(client_settings(self._options, self._name, errors))
        try:
            return len(admin.describe_cluster(request_timeout=ANSWER_SECONDS).result(2 * ANSWER_SECONDS).nodes)
        except (KafkaException, TimeoutError) as error:
            raise call_error(error, "say which nodes it has", errors.last(admin)) from error

    def _problems_of_durability(self, topics: Mapping[str, TopicDescription], nodes: int) -> Iterator[Finding]:
        """Yield topics that lose what was confirmed when a node fails, or that take nothing."""
        settings = read_settings(self._options, self._name, list(topics))
        replicas = {
            topic: min(len(partition.replicas) for partition in description.partitions) for topic, description in topics.items()
        }
        in_sync = {topic: int(values["min.insync.replicas"]) for topic, values in settings.items() if values}
        if blocked := [topic for topic, least in in_sync.items() if least > replicas[topic]]:
            yield misconfigured(
                f"{_named(blocked)} cannot be written to: min.insync.replicas is higher than the number of replicas.",
                "Add replicas, or lower min.insync.replicas.",
            )
        if unclean := [topic for topic, values in settings.items() if values.get("unclean.leader.election.enable") == "true"]:
            yield weak(
                f"{_named(unclean)} may lose confirmed messages, or leave transactions open: unclean leader elections are on.",
                "Set unclean.leader.election.enable=false.",
            )
        if nodes > 1:
            if few := [topic for topic, count in replicas.items() if count < REPLICAS]:
                yield weak(
                    f"{_named(few)} may lose confirmed messages with a node: fewer than {REPLICAS} replicas.",
                    f"Raise the number of replicas to {REPLICAS}.",
                )
            if thin := [topic for topic, least in in_sync.items() if least < IN_SYNC and topic not in few]:
                yield weak(
                    f"{_named(thin)} may lose confirmed messages with a node: one replica is enough to confirm them.",
                    f"Set min.insync.replicas={IN_SYNC}.",
                )
        if unknown := [topic for topic, values in settings.items() if not values and topic != STATE]:
            yield weak(
                f"The settings of {_named(unknown, 'topic')} were not checked: this user may not see them.",
                "Allow it DescribeConfigs on them.",
            )

    def _problems_of_cleanup(self, topics: Mapping[str, TopicDescription], marker: str) -> Iterator[Finding]:
        policy = read_settings(self._options, self._name, [marker])[marker].get("cleanup.policy", "") if marker in topics else ""
        if policy not in ("", "compact"):
            yield misconfigured(
                f"Marker topic {marker!r} has cleanup.policy={policy}: Kafka deletes markers, which decide what was sent.",
                "Set cleanup.policy=compact.",
            )


def _problems_of_missing(topics: Mapping[str, KafkaError]) -> Iterator[Finding]:
    hidden = [topic for topic, error in topics.items() if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED]
    if missing := [topic for topic in topics if topic not in hidden]:
        yield misconfigured(
            f"Kafka has no {_named(missing, 'topic')}.", "Run manage.py outbox_topics --create. Their messages wait."
        )
    if hidden:
        yield misconfigured(
            f"This user may not see {_named(hidden, 'topic')}, or it does not exist.", "Allow the user Write on it."
        )


def _problems_of_marker(topic: str, found: TopicDescription, lanes: int) -> Iterator[Finding]:
    count = len(found.partitions)
    if count <= lanes:
        yield misconfigured(
            f"Marker topic {topic!r} has {count} partitions, so no relay can use lanes {count} to {lanes}.",
            f'Give it {lanes + 1} partitions or more, or lower OUTBOX["RELAY"]["LANES"].',
        )
    if not (may(found, AclOperation.READ) and may(found, AclOperation.WRITE)):
        yield misconfigured(f"This user may not read and write marker topic {topic!r}: no relay can open a lane.", ALLOW)


def _named(topics: Sequence[str], what: str = "Topic") -> str:
    names = ", ".join(repr(topic) for topic in sorted(topics)[:NAMED])
    more = len(topics) - NAMED
    return f"{what if len(topics) == 1 else what + 's'} {names}{f' and {more} more' if more > 0 else ''}"
