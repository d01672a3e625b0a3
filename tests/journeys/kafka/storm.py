"""
A storm on Kafka: relays are killed at named points and by chance, frozen and continued, brokers are killed and frozen, sessions
of the database are ended, and PostgreSQL crashes where nobody else uses it. In a cluster, brokers stay away, and partitions of a
topic with one replica have no leader meanwhile. Then Kafka's own client counts every copy, as a reader of committed records.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psycopg
from confluent_kafka.admin import AdminClient
from django.db import Error as DatabaseError
from django.db import connection

from outbox import database
from outbox.failpoints import VARIABLE as FAILPOINTS
from outbox.models import Batch, MessageState, State
from outbox.testing.crash import TRANSACTIONS
from project.servers.kafka import Kafka
from project.servers.program import ServerError
from tests.journeys.kafka.given import NOBODY_FENCED, SEND_THEN_MARK, VARIABLE
from tests.journeys.processes import Processes, send
from tests.outbox.brokers.kafka.cluster import QUIET, SECONDS, create_topic, read
from tests.waiting import wait_until

RELAYS, PUBLISHERS = 3, 2
REACHED_SECONDS = 2  # until a relay reaches a point
START_SECONDS = 240  # until a relay works
PAUSE = (0.1, 0.8)  # seconds between two acts
FREEZES = (0.3, 1, 4, 7)  # seconds
AWAY = (8, 20)  # seconds
OUTLASTS = 5  # seconds that outlast a claim, so that another relay sends what it holds
PARTITIONS = 4
RECOVERY_SECONDS = 60

TABLES = "CREATE TABLE storm_published (number int PRIMARY KEY)"
DROP = "DROP TABLE storm_published"
LANE_SESSIONS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'outbox%%'
"""
ALL_SESSIONS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

POINTS = {"": ("relay.after_claim", *TRANSACTIONS), SEND_THEN_MARK: ("relay.after_claim", "relay.after_send")}

# Where a relay that goes on may still send what another one has sent.
STOP_POINTS = {NOBODY_FENCED: ("relay.before_transaction",)}


class Storm:
    """
    Keeps relays and publishers running, and hurts them, the broker and the database's sessions.

    Args:
        nodes: the brokers of one cluster.
        folder: for logs and permits.
        control: the rule that relays leave out; "" for none.
    """

    def __init__(self, nodes: list[Kafka], folder: Path, *, control: str = "", seed: int = 0) -> None:
        self.nodes = nodes
        self.acts: Counter[str] = Counter()
        self.settled_after = 0.0
        at = nodes[0].address
        self.ordered, *self.plain = (create_topic(partitions=PARTITIONS, at=at) for _ in range(2))
        if len(nodes) > 1:
            self.plain.append(create_topic(partitions=PARTITIONS, replicas=1, at=at))
        self.processes = Processes(folder, "tests.journeys.kafka.settings")
        self._chance = random.Random(seed)
        self._points = POINTS.get(control, POINTS[""])
        self._stop_points = STOP_POINTS.get(control, self._points)
        told = {
            "servers": [node.address for node in nodes],
            "ordered": self.ordered,
            "plain": self.plain,
            "control": control,
        }
        self._told = {VARIABLE: json.dumps(told)}
        self._relays = [self._start_relay() for _ in range(RELAYS)]
        self._publishers = [self._start("publisher", str(n * 1_000_000 + 1)) for n in range(PUBLISHERS)]

    def play(self, seconds: float) -> None:
        """Hurt by chance for so long; a short storm has some of each act."""
        wait_until(lambda: Batch.objects.filter(state=State.SENT).exists(), START_SECONDS)
        acts: dict[str, tuple[int, Callable[[], None]]] = {
            "point permitted": (16, self._kill_at_a_point),
            "relay stopped at a point": (6, self._stop_at_a_point),
            "relay killed": (3, self._kill),
            "relay frozen": (3, self._freeze),
            "broker killed": (1, self._kill_broker),
            "broker frozen": (1, self._freeze_broker),
            "lanes' sessions ended": (2, lambda: self._end_sessions(LANE_SESSIONS)),
            "all sessions ended": (1, lambda: self._end_sessions(ALL_SESSIONS)),
        }
        if len(self.nodes) > 1:
            acts["broker away, partitions without a leader"] = (2, self._keep_broker_away)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            acts["PostgreSQL crashed"] = (1, self._crash_database)
        ends_at = time.monotonic() + seconds
        queue: list[str] = []
        while time.monotonic() < ends_at:
            time.sleep(self._chance.uniform(*PAUSE))
            if not queue:
                queue = [name for name, (weight, _) in acts.items() for _ in range(weight)]
                self._chance.shuffle(queue)
            name = queue.pop()
            with suppress(AssertionError, ServerError):
                acts[name][1]()
                self.acts[name] += 1
                self._start_nodes()
            self._continue_all()
            self._keep_running()

    def settle(self, patience: float) -> None:
        """Publish no more, and wait until everything is sent."""
        for one in self._publishers:
            self._end(one)
        self._publishers.clear()
        for permit in self._permits().values():
            permit.unlink(missing_ok=True)
        self._continue_all()
        self._start_nodes()

        def is_settled() -> bool:
            self._keep_running()
            time.sleep(0.5)
            return not MessageState.objects.exclude(state="sent").exists()

        began_at = time.monotonic()
        wait_until(is_settled, patience)
        self.settled_after = time.monotonic() - began_at

    def count(self) -> dict[str, int]:
        """Count what was published, and each copy of it in the topics."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT number FROM storm_published")
            published = {number for (number,) in cursor.fetchall()}
        copies: Counter[int] = Counter()
        last: dict[bytes, int] = {}
        out_of_order = 0
        for topic in (self.ordered, *self.plain):
            for record in read(topic, at=self.nodes[0].address):
                number = json.loads(record.value())["number"]
                copies[number] += 1
                if topic == self.ordered:
                    out_of_order += copies[number] == 1 and last.get(record.key(), 0) > number
                    last[record.key()] = max(last.get(record.key(), 0), number)
        return {
            "published": len(published),
            "lost": len(published - copies.keys()),
            "doubled": sum(count > 1 for count in copies.values()),
            "out of order": out_of_order,
            "rolled back and seen": len(copies.keys() - published),
        }

    def reached(self) -> dict[str, int]:
        """Return how many relays have killed or stopped themselves at each point."""
        return dict(Counter(path.stem for path in self.processes.folder.glob("relay.*.*.*") if path.suffix[1:].isdecimal()))

    def close(self) -> None:
        self.processes.close()

    # --- what is hurt ---

    def _kill_at_a_point(self) -> None:
        """Permit the relays to kill themselves at a point: the first that gets there takes the permit, perhaps much later."""
        self._permit(self._chance.choice(self._points), "kill").touch()

    def _stop_at_a_point(self) -> None:
        """Permit the relays to stop themselves at a point, and continue the one that did, when its claim is over."""
        permit = self._permit(self._chance.choice(self._stop_points), "stop")
        permit.touch()
        wait_until(lambda: not permit.exists(), REACHED_SECONDS)
        time.sleep(OUTLASTS)

    def _kill(self) -> None:
        self._end(self._chance.choice(self._relays))

    def _freeze(self) -> None:
        relay = self._chance.choice(self._relays)
        send(relay, signal.SIGSTOP)
        try:
            time.sleep(self._chance.choice(FREEZES))
        finally:
            send(relay, signal.SIGCONT)

    def _kill_broker(self) -> None:
        node = self._chance.choice(self.nodes)
        node.kill()
        time.sleep(self._chance.uniform(0, 2))
        node.start()

    def _keep_broker_away(self) -> None:
        """Keep a broker away while relays are killed: partitions whose only replica it has get no leader."""
        node = self._chance.choice(self.nodes)
        node.kill()
        try:
            wait_until(self._is_without_leader, SECONDS)
            ends_at = time.monotonic() + self._chance.uniform(*AWAY)
            while time.monotonic() < ends_at:
                time.sleep(self._chance.uniform(*PAUSE))
                self._chance.choice([self._kill_at_a_point, self._kill])()
                self._keep_running()
        finally:
            node.start()

    def _is_without_leader(self) -> bool:
        admin = AdminClient({"bootstrap.servers": ",".join(node.address for node in self.nodes), **QUIET})
        lone = self.plain[-1]
        return any(one.leader < 0 for one in admin.list_topics(lone, timeout=SECONDS).topics[lone].partitions.values())

    def _freeze_broker(self) -> None:
        node = self._chance.choice(self.nodes)
        node.freeze()
        try:
            time.sleep(self._chance.choice(FREEZES))
        finally:
            node.thaw()

    def _end_sessions(self, which: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(which.replace("%%", "%"))

    def _crash_database(self) -> None:
        """Kill a server process: PostgreSQL then ends all others, and recovers from its log as after a crash of the machine."""
        with database.connect("default") as own:
            os.kill(own.info.backend_pid, signal.SIGKILL)
            with suppress(psycopg.OperationalError):
                own.execute("SELECT pg_sleep(10)")
        connection.close()
        wait_until(self._is_database_up, RECOVERY_SECONDS)

    @staticmethod
    def _is_database_up() -> bool:
        try:
            connection.ensure_connection()
        except DatabaseError:
            return False
        return True

    # --- processes ---

    def _start(self, module: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        return self.processes.start(f"tests.journeys.kafka.{module}", *arguments, **self._told, **variables)

    def _start_relay(self) -> subprocess.Popen[bytes]:
        plan = ",".join(f"{point}={act}:{permit}" for (point, act), permit in self._permits().items())
        return self._start("relay", **{FAILPOINTS: plan})

    def _permits(self) -> dict[tuple[str, str], Path]:
        return {(point, act): self._permit(point, act) for point in self._points for act in ("kill", "stop")}

    def _permit(self, point: str, act: str) -> Path:
        return self.processes.folder / f"{point}.{act}"

    def _continue_all(self) -> None:
        for relay in self._relays:
            send(relay, signal.SIGCONT)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        send(process, signal.SIGKILL)
        process.wait()

    def _start_nodes(self) -> None:
        """Start nodes that are not there, since a busy machine took too long for their last start."""
        for node in self.nodes:
            if not node.is_running:
                node.start()

    def _keep_running(self) -> None:
        self._relays = [one if one.poll() is None else self._start_relay() for one in self._relays]
        for index, one in enumerate(self._publishers):
            assert one.poll() is None, f"publisher {index} has ended"
