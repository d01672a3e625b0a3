"""
A storm on RabbitMQ: nodes, connections, queues, relays, consumers and publishers are hurt for minutes, by chance.

It is counted without what the framework counts: in the tables that the transactions wrote, in queues of the storm's own that get
a copy of each message, in what the handlers wrote, and in the table of dead letters. What an operator deletes on purpose, by
purging a queue, is counted apart: it is lost, and has to be found as gaps.
"""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import amqp

from outbox.brokers.rabbitmq.topology import group_queues, queue_name
from outbox.models import Deferred, Gap, MessageState
from project.servers.rabbitmq import Cluster, RabbitMQ
from tests.journeys import storms
from tests.journeys.outcome import Outcome
from tests.journeys.processes import Processes
from tests.journeys.rabbitmq.given import DELAY, LIMIT, VARIABLE, names
from tests.journeys.storms import Acts, say
from tests.journeys.tables import rows
from tests.waiting import wait_until

PARTED_SECONDS = 20  # until the others have noticed it
STATISTICS_SECONDS = 6  # quorum queues count their messages that often

TABLES = """
CREATE TABLE storm_published (number int, message_id uuid, topic text, kind text, key text);
CREATE TABLE storm_effect (id bigserial, consumer_group text, topic text, key text, number int);
CREATE TABLE storm_failed (consumer_group text, number int, failed_at timestamptz DEFAULT clock_timestamp())
"""

# What the reason of a dead letter has in it, by kind.
REASONS = {
    "bad": ["ValueError: bad"],
    "rejected": ["of no use"],
    "loop": ["TimeLimitExceeded"],
    "stuck": ["TimeLimitExceeded", "the handler ran beyond its time_limit"],
}


def raise_alarm(node: RabbitMQ, seconds: float) -> None:
    """Take a node's memory away for a while."""
    node.control("set_vm_memory_high_watermark", "0.0001")
    try:
        time.sleep(seconds)
    finally:
        wait_until(lambda: _is_lifted(node), 180)


def _is_lifted(node: RabbitMQ) -> bool:
    with suppress(subprocess.SubprocessError):  # rabbitmqctl takes long on a busy machine
        node.control("set_vm_memory_high_watermark", "0.6")
        return True
    return False


def count_waiting(node: RabbitMQ) -> dict[str, int]:
    """Return how many messages each queue has, those included that consumers hold."""
    lines = node.control("list_queues", "name", "messages", "--quiet", "--no-table-headers").splitlines()
    return {name: int(count) for name, _, count in (line.partition("\t") for line in lines)}


class Storm(storms.Storm):
    """
    A storm on one node or a cluster.

    Args:
        folder: for logs and Celery's files.
        unique: the suffix of all names.
    """

    kinds = {"relay": 2, "celery": 1, "consumer": 2, "consumer of two": 1, "consumer of spare": 1, "publisher": 2}
    publisher = "tests.journeys.rabbitmq.publisher"
    first = ("leader killed", "broker partitioned")

    def __init__(self, cluster: Cluster, folder: Path, unique: str) -> None:
        told = {VARIABLE: json.dumps({"unique": unique, "nodes": [node.address for node in cluster.nodes]})}
        super().__init__(Processes(folder, "tests.journeys.rabbitmq.settings"), told, unique)
        self.cluster, self.nodes = cluster, cluster.nodes
        self.names = names(unique)
        self.acted_at: list[tuple[str, float]] = []
        self.purged = 0  # messages
        self._tap()
        self.begin()

    def list_acts(self) -> Acts:
        acts: Acts = {
            "process killed": (6, self.kill),
            "process frozen": (4, self.freeze),
            "process stopped": (1, self.stop),
            "broker killed": (2, lambda: self._kill_node(self._node())),
            "broker frozen": (2, self._freeze_node),
            "broker without memory": (2, self._alarm),
            "connections closed": (2, self._close_connections),
            "queue purged": (1, self._purge),
            "queue deleted": (1, self._delete),
        }
        if len(self.nodes) > 1:
            acts |= {"leader killed": (3, lambda: self._kill_node(self._leader())), "broker partitioned": (3, self._part)}
        return acts

    def command(self, kind: str) -> list[str]:
        groups = {"consumer": self.names.one, "consumer of two": self.names.two, "consumer of spare": self.names.third}
        if kind in groups:
            return ["django", "outbox_consume", "--threads", "2", "--group", groups[kind]]
        return super().command(kind)

    def is_under_way(self) -> bool:
        [(groups,)] = rows("SELECT count(DISTINCT (consumer_group, topic)) FROM storm_effect")
        return groups == sum(map(len, self.names.groups.values()))

    # --- what is hurt ---

    def _kill_node(self, node: RabbitMQ) -> None:
        queues = [*self._queues(), *map(_tap, self.names.groups)]
        wait_until(lambda: all(node.knows_after_crash(name) for name in queues), 20)
        self._mark("kill node")
        self.restart(node)

    def _freeze_node(self) -> None:
        self._mark("freeze node")
        self.freeze_server(self._node())

    def _part(self) -> None:
        node = self._leader()
        self._mark("part node")
        self.cluster.part(node)
        try:
            wait_until(lambda: self.cluster.is_parted(node), PARTED_SECONDS)
            time.sleep(self.chance.uniform(3, 12))
            assert self.cluster.is_parted(node), "The nodes have found each other again."
        finally:
            self.cluster.heal(node)

    def _alarm(self) -> None:
        self._mark("broker without memory")
        raise_alarm(self._node(), self.chance.choice([2, 6, 15]))

    def _close_connections(self) -> None:
        self._mark("connections closed")
        self._node().control("close_all_connections", "a storm")

    def _purge(self) -> None:
        """Purge the queue of the spare topic while messages wait there."""
        with self.frozen("consumer of spare 0"), self._channel() as channel:
            queue = queue_name(self.names.spare, self.names.third)
            wait_until(lambda: _count(channel, queue) > 3, 10)
            self.purged += channel.queue_purge(queue) or 0

    def _delete(self) -> None:
        """Delete an empty queue while all processes are frozen, so that nothing is lost with it."""
        with self.frozen(*self.running):
            time.sleep(STATISTICS_SECONDS)
            waiting = self.waiting()
            empty = [name for name in self._queues() if waiting.get(name) == 0]
            name = self.chance.choice(empty)
            say(f"{name} is deleted")
            with self._channel() as channel:
                channel.queue_delete(name)

    def _mark(self, what: str) -> None:
        self.acted_at.append((what, time.time()))

    # --- what is counted ---

    def _tap(self) -> None:
        """Bind a queue of the storm's own to each topic, which gets a copy of each message."""
        with self._channel() as channel:
            for topic in self.names.groups:
                channel.exchange_declare(topic, "topic", durable=True, auto_delete=False)
                channel.queue_declare(_tap(topic), durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
                channel.queue_bind(_tap(topic), topic, routing_key="#")

    def copies(self) -> Counter[int]:
        """Count the copies of each number that the broker has handed on."""
        return Counter(_number(one) for topic in self.names.groups for one in self._take(_tap(topic)))

    def letters(self) -> dict[tuple[str, int], list[str]]:
        """Return the reasons of the dead letters of each group and number."""
        found: dict[tuple[str, int], list[str]] = {}
        for letter in Deferred.objects.exclude(dead_at=None):
            found.setdefault((letter.consumer_group, json.loads(bytes(letter.body))["number"]), []).append(letter.error)
        return found

    def waiting(self) -> dict[str, int]:
        return count_waiting(self._node())

    def left(self) -> dict[str, int]:
        """Return what waits anywhere though nothing should: in queues of groups, or as a deferred message."""
        taps = tuple(map(_tap, self.names.groups))
        found = {name: count for name, count in self.waiting().items() if count and not name.endswith(taps)}
        deferred = Deferred.objects.filter(dead_at=None).count()
        return found | ({"outbox_deferred": deferred} if deferred else {})

    def gaps(self) -> list[Gap]:
        """Return the gaps that were found in what the operator purged."""
        return list(Gap.objects.filter(consumer_group=self.names.third, closed_at=None))

    def unseen(self) -> list[tuple[int, int]]:
        """Return the lanes and numbers that were purged and are not in a gap, though earlier and later ones have arrived."""
        applied = {number for (number,) in rows("SELECT number FROM storm_effect WHERE topic = %s", [self.names.spare])}
        places = rows(PLACES, [self.names.spare])
        arrived: dict[int, list[int]] = {}
        for number, lane, seq in places:
            if number in applied:
                arrived.setdefault(lane, []).append(seq)
        seen = {(gap.lane, seq) for gap in self.gaps() for seq in range(gap.first_number, gap.last_number + 1)}
        return [
            (lane, seq)
            for number, lane, seq in places
            if number not in applied and (lane, seq) not in seen
            if lane in arrived and min(arrived[lane]) < seq < max(arrived[lane])
        ]

    def is_settled(self) -> bool:
        """Return whether each message is handled or a dead letter, nothing waits, and gaps are found."""
        time.sleep(1)
        if MessageState.objects.exclude(state="sent").exists():
            return False
        with suppress(subprocess.SubprocessError):
            if not self.left():
                time.sleep(STATISTICS_SECONDS)
                return not self.left() and not self.unseen()
        return False

    def _take(self, queue: str) -> Iterator[amqp.Message]:
        """Yield all messages of a queue, and remove them."""
        with self._channel() as channel:
            count, found = _count(channel, queue), list[amqp.Message]()
            channel.basic_consume(queue, no_ack=True, callback=found.append)
            while len(found) < count:
                channel.connection.drain_events(timeout=30)
            yield from found

    def _queues(self) -> list[str]:
        """Return the names of the queues that an operator may delete while they are empty."""
        pairs = [(topic, group) for topic, groups in self.names.groups.items() for group in groups]
        return [queue for pair in pairs for queue in group_queues(*pair)]

    def _node(self) -> RabbitMQ:
        return self.chance.choice(self.cluster.nodes)

    def _leader(self) -> RabbitMQ:
        return self.cluster.leader(queue_name(self.names.work, self.names.one))

    @contextmanager
    def _channel(self) -> Iterator[amqp.Channel]:
        with amqp.Connection(self._node().address) as one, one.channel() as channel:
            yield channel


class Count:
    """What a storm has left behind, once it is calm."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        all_ = storm.names
        self.published = {
            number: (topic, kind) for number, topic, kind in rows("SELECT number, topic, kind FROM storm_published")
        }
        self.copies, self.letters, self.left = storm.copies(), storm.letters(), storm.left()
        self.effects = Counter((group, number) for group, number in rows("SELECT consumer_group, number FROM storm_effect"))
        expected = {(group, number) for number, (topic, _) in self.published.items() for group in all_.groups[topic]}
        missing = expected - self.effects.keys() - self.letters.keys()
        self.purged = {one for one in missing if one[0] == all_.third}
        self.not_applied = missing - self.purged

    def wrong(self) -> list[str]:
        """Return what is not as it should be, a line each."""
        found = [f"lost: {number} {self.published[number]}" for number in sorted(self.lost())]
        found += [f"ghost: {number}" for number in self.ghosts()]
        found += [f"applied {times} times: {one}" for one, times in self.effects.items() if times > 1]
        found += [f"not applied, and no dead letter: {one} {self.published[one[1]]}" for one in sorted(self.not_applied)]
        found += [f"applied, and a dead letter: {one} {self.letters[one]}" for one in self.letters.keys() & self.effects.keys()]
        found += [f"wrong reason: {one} {self.published.get(one[1])}: {reasons}" for one, reasons in self._wrong_reasons()]
        found += [f"key {key} out of order: {numbers}" for key, numbers in self._keys().items() if numbers != sorted(numbers)]
        found += [f"{one} used up its retries in {times} tries and {seconds:.1f} s" for one, times, seconds in self._hasty()]
        found += [f"{count} messages wait in {name}" for name, count in self.left.items()]
        found += [f"no gap was found: number {number} of lane {lane}" for lane, number in self.storm.unseen()]
        if len(self.purged) > self.storm.purged:
            found.append(
                f"of {self.storm.names.spare}, {len(self.purged)} messages are gone, and {self.storm.purged} were purged"
            )
        return found

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        doubles = {one: reasons for one, reasons in self.letters.items() if len(reasons) > 1}
        more = self.copies.total() - len(self.copies)
        return {
            "acts": dict(self.storm.acts),
            "seconds to settle": round(self.storm.settled_after),
            "committed": len(self.published),
            "lost": len(self.lost()),
            "ghosts": len(self.ghosts()),
            "applied": self.effects.total(),
            "applied twice": sum(times > 1 for times in self.effects.values()),
            "not applied": len(self.not_applied),
            "dead letters": len(self.letters),
            "letters too many": sum(len(reasons) - 1 for reasons in doubles.values()),
            "purged": self.storm.purged,
            "of these not applied": len(self.purged),
            "gaps": sum(gap.last_number - gap.first_number + 1 for gap in self.storm.gaps()),
            "copies too many": more,
            "left": self.left,
            "shortest time to use up retries (s)": round(min((seconds for *_, seconds in self._spans()), default=0), 1),
            "most runs to use them up": max((times for _, times, _ in self._spans()), default=0),
            "longest until sending went on, after (s)": self._pauses(),
        }

    def outcome(self, seconds: float) -> Outcome:
        """Return the figures of the report."""
        return Outcome(
            run="relays and consumers",
            broker="rabbitmq",
            nodes=len(self.storm.cluster.nodes),
            seconds=seconds,
            faults=self.storm.acts,
            messages=len(self.published),
            lost=len(self.lost()) + len(self.not_applied),
            ghosts=len(self.ghosts()),
            copies=self.copies.total() - len(self.copies),
            applied_twice=sum(times > 1 for times in self.effects.values()),
            out_of_order=sum(later < earlier for numbers in self._keys().values() for earlier, later in pairwise(numbers)),
            settled_seconds=self.storm.settled_after,
        )

    def lost(self) -> set[int]:
        """Return what no exchange has seen, nor a handler."""
        return self.published.keys() - self.copies.keys() - {number for _, number in [*self.effects, *self.letters]}

    def ghosts(self) -> set[int]:
        seen = self.copies.keys() | {number for _, number in [*self.effects, *self.letters]}
        return seen - self.published.keys()

    def _wrong_reasons(self) -> list[tuple[tuple[str, int], list[str]]]:
        def is_right(one: tuple[str, int], reason: str) -> bool:
            return any(part in reason for part in REASONS.get(self.published.get(one[1], ("", ""))[1], []))

        return [(one, reasons) for one, reasons in self.letters.items() if not all(is_right(one, reason) for reason in reasons)]

    def _keys(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for key, number in rows("SELECT key, number FROM storm_effect WHERE key <> '' ORDER BY id"):
            found.setdefault(key, []).append(number)
        return found

    def _spans(self) -> list[tuple[tuple[str, int], int, float]]:
        """Return how often each message that is a dead letter has failed, and in how many seconds."""
        spans = rows(SPANS)
        return [((group, number), times, seconds) for group, number, times, seconds in spans if (group, number) in self.letters]

    def _hasty(self) -> list[tuple[tuple[str, int], int, float]]:
        """
        Return the messages that used up their retries faster than the delays between them allow, or were handled too often.

        A process that is killed after a failure, and before it is counted, makes one run more.
        """
        spans = self._spans()
        return [(one, times, seconds) for one, times, seconds in spans if seconds < SHORTEST or times > LIMIT + 1 + UNCOUNTED]

    def _pauses(self) -> dict[str, float]:
        """Return, by what was done to the broker, the longest time until sending went on."""
        sent = [at for (at,) in rows(SENT)]
        found: dict[str, float] = {}
        for what, at in self.storm.acted_at:
            pauses = [later - max(at, one) for one, later in pairwise(sent) if one < at + self.storm.pause[1] and later > at]
            found[what] = max(round(max(pauses, default=0.0), 1), found.get(what, 0.0))
        return found


SENT = "SELECT extract(epoch FROM sent_at)::float8 FROM outbox_batch WHERE state = 3 ORDER BY sent_at"

SPANS = """
SELECT consumer_group, number, count(*), extract(epoch FROM max(failed_at) - min(failed_at))::float8
FROM storm_failed GROUP BY 1, 2
"""
UNCOUNTED = 2  # runs
SHORTEST = LIMIT * DELAY.total_seconds()

PLACES = """
SELECT p.number, s.lane, s.number FROM storm_published p JOIN outbox_message_state s ON s.id = p.message_id WHERE p.topic = %s
"""


def _count(channel: amqp.Channel, queue: str) -> int:
    answer = channel.queue_declare(queue, passive=True)
    assert answer is not None, "it is waited for"
    return answer[1]


def _number(message: amqp.Message) -> int:
    return int(json.loads(message.body)["number"])


def _tap(topic: str) -> str:
    return f"tap-{topic}"
