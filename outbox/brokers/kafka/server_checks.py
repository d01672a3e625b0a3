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
from outbox.brokers.kafka.topics import describe_topics, existing_topics, is_allowed, read_settings
from outbox.brokers.owners import NO_OWNER, GroupOwners, OwnedByAnother
from outbox.errors import BrokerMisconfigured
from outbox.findings import Finding, misconfigured, weak

REPLICAS, IN_SYNC = 3, 2  # with fewer, the failure of one server may lose confirmed messages
STATE = "__transaction_state"  # the topic in which Kafka records the states of transactions
NAMED = 3  # the maximum number of topics that a text names

ONE_NODE = "The cluster has one node: confirmed messages are lost with its disk, and nothing can be sent while it is down."
ONE_NODE_HINT = "For production, use three nodes or more, replication factor 3 and min.insync.replicas=2."


class KafkaServerChecks:
    """Checks of one cluster, as the user of OPTIONS sees it."""

    def __init__(self, options: KafkaOptions, name: str) -> None:
        self._options = options
        self._name = name

    def problems_of_topics(self, topics: Sequence[str]) -> list[Finding]:
        """Return problems of topics of messages. Raises BrokerUnavailable."""
        nodes = self._count_nodes()
        described = describe_topics(self._options, self._name, topics)
        existing = existing_topics(described)
        missing = {topic: description for topic, description in described.items() if isinstance(description, KafkaError)}
        problems = list(_problems_of_missing(missing))
        if denied := [topic for topic, description in existing.items() if not is_allowed(description, AclOperation.WRITE)]:
            text = f"This user may not write to {_named(denied, 'topic')}."
            problems.append(misconfigured(text, "Allow this user Write on them. Messages wait until then."))
        if nodes == 1:
            problems.append(weak(ONE_NODE, ONE_NODE_HINT))
        return [*problems, *self._problems_of_durability(existing, nodes)]

    def problems_of_groups(self, topics: Mapping[str, Collection[str]], owners: GroupOwners) -> list[Finding]:
        """
        Return findings about topics that this user may not read, and groups of another outbox. Raises BrokerUnavailable.

        Args:
            topics: topic -> its groups.
            owners: the owners of groups, as set in this process.
        """
        pairs = [(topic, group) for topic, groups in sorted(topics.items()) for group in sorted(groups)]
        existing = existing_topics(describe_topics(self._options, self._name, sorted({topic for topic, _ in pairs})))
        problems: list[Finding] = []
        if unread := [topic for topic, description in existing.items() if not is_allowed(description, AclOperation.READ)]:
            problems.append(misconfigured(f"This user may not read {_named(unread, 'topic')}.", "Allow this user Read on them."))
        return [*problems, *self._problems_of_owners(pairs, existing, owners)]

    def _problems_of_owners(
        self, pairs: Sequence[tuple[str, str]], existing: Mapping[str, TopicDescription], owners: GroupOwners
    ) -> Iterator[Finding]:
        for topic, group in pairs:
            ours = owners.get(group)
            if ours is not NO_OWNER and topic in existing:
                topic_partitions = [TopicPartition(topic, number) for number in range(len(existing[topic].partitions))]
                with closing(Consumer(member_settings(self._options, self._name, group))) as consumer:
                    try:
                        require_owner(group, committed_notes(consumer, topic_partitions), ours)
                    except OwnedByAnother as error:
                        yield misconfigured(*error.args)
                    except BrokerMisconfigured as error:
                        yield misconfigured(error.message, error.hint)

    def problems_of_lanes(self, source: str, lanes: int) -> list[Finding]:
        """
        Return problems that the transactions of an outbox may have. Raises BrokerUnavailable.

        Args:
            source: the stable id of the outbox.
            lanes: the highest number of a lane.
        """
        topic = marker_topic(source)
        nodes = self._count_nodes()
        described = describe_topics(self._options, self._name, [topic, STATE])
        existing = existing_topics(described)
        problems: list[Finding] = []
        marker = described[topic]
        if isinstance(marker, KafkaError):
            if marker.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                problems.append(misconfigured(f"This user may not see the marker topic {topic!r}.", ALLOW))
        else:
            problems += _problems_of_marker(topic, marker, lanes)
        return [*problems, *self._problems_of_durability(existing, nodes), *self._problems_of_cleanup(existing, topic)]

    def _count_nodes(self) -> int:
        errors = ConnectionErrors()
        admin = AdminClient(client_settings(self._options, self._name, errors))
        try:
            return len(admin.describe_cluster(request_timeout=ANSWER_SECONDS).result(2 * ANSWER_SECONDS).nodes)
        except (KafkaException, TimeoutError) as error:
            raise call_error(error, "list its nodes", errors.last(admin)) from error

    def _problems_of_durability(self, topics: Mapping[str, TopicDescription], nodes: int) -> Iterator[Finding]:
        """Yield findings about topics that may lose confirmed messages with a node, or that cannot be written to."""
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
                "Allow this user DescribeConfigs on them.",
            )

    def _problems_of_cleanup(self, topics: Mapping[str, TopicDescription], marker: str) -> Iterator[Finding]:
        policy = read_settings(self._options, self._name, [marker])[marker].get("cleanup.policy", "") if marker in topics else ""
        if policy not in ("", "compact"):
            yield misconfigured(
                f"Marker topic {marker!r} has cleanup.policy={policy}, so Kafka deletes markers, which prove what was committed.",
                "Set cleanup.policy=compact.",
            )


def _problems_of_missing(topics: Mapping[str, KafkaError]) -> Iterator[Finding]:
    hidden = [topic for topic, error in topics.items() if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED]
    if missing := [topic for topic in topics if topic not in hidden]:
        yield misconfigured(
            f"Kafka has no {_named(missing, 'topic')}.", "Run manage.py outbox_topics --create. Messages wait until then."
        )
    if hidden:
        yield misconfigured(
            f"This user may not see {_named(hidden, 'topic')}, or it does not exist.", "Allow the user Write on it."
        )


def _problems_of_marker(topic: str, description: TopicDescription, lanes: int) -> Iterator[Finding]:
    count = len(description.partitions)
    if count <= lanes:
        yield misconfigured(
            f"Marker topic {topic!r} has {count} partitions, so no relay can use lanes {count} to {lanes}.",
            f'Give it {lanes + 1} partitions or more, or lower OUTBOX["RELAY"]["LANES"].',
        )
    if not (is_allowed(description, AclOperation.READ) and is_allowed(description, AclOperation.WRITE)):
        yield misconfigured(f"This user may not read and write marker topic {topic!r}: no relay can open a lane.", ALLOW)


def _named(topics: Sequence[str], noun: str = "Topic") -> str:
    """Return a noun with the names of some topics."""
    names = ", ".join(repr(topic) for topic in sorted(topics)[:NAMED])
    more = len(topics) - NAMED
    return f"{noun if len(topics) == 1 else noun + 's'} {names}{f' and {more} more' if more > 0 else ''}"
