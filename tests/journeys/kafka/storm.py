"""
A storm on Kafka: relays are killed at named points and by chance, frozen and continued, brokers are killed and frozen, sessions
of the database are ended, and PostgreSQL crashes where nobody else uses it. In a cluster, brokers stay away, and partitions of a
topic with one replica have no leader meanwhile. Then Kafka's own client counts every copy, as a reader of committed records.
"""

import json
import os
import signal
import time
from collections import Counter
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
from tests.journeys import storms
from tests.journeys.kafka.given import NOBODY_FENCED, SEND_THEN_MARK, VARIABLE
from tests.journeys.outcome import Outcome
from tests.journeys.processes import Processes, send
from tests.journeys.storms import Acts
from tests.journeys.tables import rows
from tests.outbox.brokers.kafka.cluster import QUIET, SECONDS, create_topic, read
from tests.waiting import wait_until

REACHED_SECONDS = 2  # until a relay reaches a point
AWAY = (8, 20)  # seconds
OUTLASTS = 5  # seconds that outlast a claim, so that another relay sends what it holds
PARTITIONS = 4
RECOVERY_SECONDS = 60

TABLES = "CREATE TABLE storm_published (number int PRIMARY KEY)"
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


class Storm(storms.Storm):
    """
    A storm on one node or a cluster.

    Args:
        folder: for logs and permits.
        control: the rule that relays leave out; "" for none.
    """

    kinds = {"relay": 3, "publisher": 2}
    publisher = "tests.journeys.kafka.publisher"
    pause = (0.1, 0.8)
    freezes = (0.3, 1, 4, 7)

    def __init__(self, nodes: list[Kafka], folder: Path, *, control: str = "") -> None:
        at = nodes[0].address
        self.ordered, *self.plain = (create_topic(partitions=PARTITIONS, at=at) for _ in range(2))
        if len(nodes) > 1:
            self.plain.append(create_topic(partitions=PARTITIONS, replicas=1, at=at))
        self.folder = folder
        self._points = POINTS.get(control, POINTS[""])
        self._stop_points = STOP_POINTS.get(control, self._points)
        given = {
            "servers": [node.address for node in nodes],
            "ordered": self.ordered,
            "plain": self.plain,
            "control": control,
        }
        permits = [(point, act) for point in self._points for act in ("kill", "stop")]
        plan = ",".join(f"{point}={act}:{self._permit(point, act)}" for point, act in permits)
        told = {VARIABLE: json.dumps(given), FAILPOINTS: plan}
        super().__init__(Processes(folder, "tests.journeys.kafka.settings"), told, seed="0")
        self.nodes = nodes
        self.begin()

    def list_acts(self) -> Acts:
        acts: Acts = {
            "point permitted": (16, self._kill_at_a_point),
            "relay stopped at a point": (6, self._stop_at_a_point),
            "relay killed": (3, lambda: self.kill("relay")),
            "relay frozen": (3, lambda: self.freeze("relay")),
            "broker killed": (1, lambda: self.restart(self._node())),
            "broker frozen": (1, lambda: self.freeze_server(self._node())),
            "lanes' sessions ended": (2, lambda: self._end_sessions(LANE_SESSIONS)),
            "all sessions ended": (1, lambda: self._end_sessions(ALL_SESSIONS)),
        }
        if len(self.nodes) > 1:
            acts["broker away, partitions without a leader"] = (2, self._keep_broker_away)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            acts["PostgreSQL crashed"] = (1, self._crash_database)
        return acts

    def command(self, kind: str) -> list[str]:
        return ["tests.journeys.kafka.relay"] if kind == "relay" else super().command(kind)

    def is_under_way(self) -> bool:
        return Batch.objects.filter(state=State.SENT).exists()

    def calm(self) -> None:
        """Take back the permits, too."""
        for permit in (*self.folder.glob("*.kill"), *self.folder.glob("*.stop")):
            permit.unlink(missing_ok=True)
        super().calm()

    def keep_running(self) -> None:
        """Continue relays that have stopped themselves, too."""
        for process in self.running.values():
            send(process, signal.SIGCONT)
        super().keep_running()

    def is_settled(self) -> bool:
        """Return whether everything is sent."""
        time.sleep(0.5)
        return not MessageState.objects.exclude(state="sent").exists()

    def reached(self) -> dict[str, int]:
        """Return how many relays have killed or stopped themselves at each point."""
        return dict(Counter(path.stem for path in self.folder.glob("relay.*.*.*") if path.suffix[1:].isdecimal()))

    # --- what is hurt ---

    def _kill_at_a_point(self) -> None:
        """Permit the relays to kill themselves at a point: the first that gets there takes the permit, perhaps much later."""
        self._permit(self.chance.choice(self._points), "kill").touch()

    def _stop_at_a_point(self) -> None:
        """Permit the relays to stop themselves at a point, and continue the one that did, when its claim is over."""
        permit = self._permit(self.chance.choice(self._stop_points), "stop")
        permit.touch()
        wait_until(lambda: not permit.exists(), REACHED_SECONDS)
        time.sleep(OUTLASTS)

    def _node(self) -> Kafka:
        return self.chance.choice(self.nodes)

    def _keep_broker_away(self) -> None:
        """Keep a broker away while relays are killed: partitions whose only replica it has get no leader."""
        node = self._node()
        node.kill()
        try:
            wait_until(self._is_without_leader, SECONDS)
            ends_at = time.monotonic() + self.chance.uniform(*AWAY)
            while time.monotonic() < ends_at:
                time.sleep(self.chance.uniform(*self.pause))
                self.chance.choice([self._kill_at_a_point, lambda: self.kill("relay")])()
        finally:
            node.start()

    def _is_without_leader(self) -> bool:
        admin = AdminClient({"bootstrap.servers": ",".join(node.address for node in self.nodes), **QUIET})
        lone = self.plain[-1]
        return any(one.leader < 0 for one in admin.list_topics(lone, timeout=SECONDS).topics[lone].partitions.values())

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

    def _permit(self, point: str, act: str) -> Path:
        return self.folder / f"{point}.{act}"


class Count:
    """What a storm has left behind: what was published, and each copy of it in the topics."""

    def __init__(self, storm: Storm) -> None:
        self.storm, self.nodes = storm, len(storm.nodes)
        self.published = {number for (number,) in rows("SELECT number FROM storm_published")}
        self.copies: Counter[int] = Counter()
        self.out_of_order = 0
        self.reached = sum(storm.reached().values())
        last: dict[bytes, int] = {}
        for topic in (storm.ordered, *storm.plain):
            for record in read(topic, at=storm.nodes[0].address):
                number = json.loads(record.value())["number"]
                self.copies[number] += 1
                if topic == storm.ordered:
                    self.out_of_order += self.copies[number] == 1 and last.get(record.key(), 0) > number
                    last[record.key()] = max(last.get(record.key(), 0), number)
        self.lost = self.published - self.copies.keys()
        self.ghosts = self.copies.keys() - self.published
        self.doubled = {number for number, count in self.copies.items() if count > 1}

    def report(self) -> dict[str, object]:
        """Return the figures."""
        figures = {"published": len(self.published), "lost": len(self.lost), "doubled": len(self.doubled)}
        figures |= {"out of order": self.out_of_order, "rolled back and seen": len(self.ghosts)}
        return {**figures, "acts": dict(self.storm.acts), "reached": self.storm.reached()}

    def outcome(self, seconds: float) -> Outcome:
        """Return the figures of the report."""
        return Outcome(
            run="relays",
            broker="kafka",
            nodes=self.nodes,
            seconds=seconds,
            faults={**self.storm.acts, "point permitted": 0, "relay killed or stopped at a point": self.reached},
            messages=len(self.published),
            lost=len(self.lost),
            ghosts=len(self.ghosts),
            copies=len(self.doubled),
            applied_twice=None,
            out_of_order=self.out_of_order,
            settled_seconds=self.storm.settled_after,
        )
