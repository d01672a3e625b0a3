"""
A storm over consumers: handlers that fail, hang, loop and kill their process; processes that are killed, frozen, stopped and
deployed in two releases side by side; an operator who replays dead letters, and has others run at once.

In the end each message is applied once, or a dead letter with its true reason, and nothing else is left; messages of a key are
applied in their order.
"""

import json
import random
import re
import signal
import subprocess
import time
import uuid
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from django.db import connection
from django.db.models import QuerySet

from outbox.brokers.base import Broker, Outgoing
from outbox.consuming.acts import settle
from outbox.message import Header
from outbox.models import Act, Deferred, Inbox, Process
from tests.journeys.consumers.given import VARIABLE, names
from tests.journeys.outcome import Outcome
from tests.journeys.processes import Processes
from tests.journeys.tables import rows
from tests.waiting import wait_until

A_SECOND = 20  # messages
PAUSE = (0.5, 3.0)  # seconds between two acts
PROCESSES = 4  # every second one of the second release
KEYS = ["a", "b", "c", "d"]

TABLE = """
CREATE TABLE storm_effect (id bigserial, message_id text, topic text, key text, number int, began_at timestamptz,
    handled_at timestamptz DEFAULT clock_timestamp())
"""

# What a message does, and how often; what the reason of its dead letter has in it, None where it is applied.
KINDS: dict[str, tuple[int, str | None]] = {
    "fine": (1200, None),
    "flaky": (60, None),
    "later": (60, None),
    "slow": (8, None),
    "bad": (30, "ValueError: bad"),
    "rejected": (30, "of no use"),
    "slow and bad": (3, "ValueError: slow and bad"),
    "exit": (15, "SystemExit: 7"),
    "loop": (1, "TimeLimitExceeded|begun 5 times, never ended"),  # where the storm ended its process each time
    "kill": (1, "begun 5 times, never ended"),
}
# Handlers that end the process, or are interrupted.
HARMFUL = {"exit": "handler exits", "loop": "handler loops", "kill": "handler kills its process"}
ACTS = {
    "consumer killed": 2,
    "consumer stopped": 3,
    "consumer frozen": 1,
    "database session ended": 2,
    "dead letter replayed": 2,
    "run at once": 2,
}
TYPES = {"Told": 8, "Older": 1, "Newer": 1}


class Storm:
    """Sends, keeps processes running, hurts them, and counts. `storm`: backend, options and the names' suffix."""

    def __init__(self, storm: dict[str, Any], broker: Broker, folder: Path) -> None:
        self.storm, self.broker = storm, broker
        self._processes = Processes(folder, "tests.journeys.consumers.settings")
        self.work, self.steps, self.group = names(storm)
        self.sent: dict[str, tuple[str, str, float]] = {}  # id -> kind, type and topic, when
        self.acts: Counter[str] = Counter()
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * PROCESSES
        self.frozen: dict[int, float] = {}  # place -> when to thaw it
        self.chance = random.Random(storm["unique"])
        self.settled_after = 0.0

    def play(self, seconds: float) -> None:
        """Send and hurt for so long, once both releases are there: what no live process takes is ignored."""
        self._keep_running()
        wait_until(lambda: Process.objects.values("subscriptions").distinct().count() == 2, 120)
        end = time.monotonic() + seconds
        next_act = time.monotonic() + PAUSE[1]
        while time.monotonic() < end:
            self._keep_running()
            self._send()
            if time.monotonic() >= next_act:
                self._act()
                next_act = time.monotonic() + self.chance.uniform(*PAUSE)
            time.sleep(1 / A_SECOND)

    def settle(self, patience: float) -> None:
        """Hurt nobody any more, and wait until nothing is left to do."""
        for place in self.frozen:
            self._signal(place, signal.SIGCONT)
        self.frozen.clear()
        began_at = time.monotonic()
        try:
            wait_until(self._is_settled, patience)
        except AssertionError:
            open_ones = self.sent.keys() - self._settled()
            kinds = Counter(self.sent[one][:2] for one in open_ones)
            ignored = Counter(
                self.sent[str(one)][0]
                for one in Inbox.objects.filter(message_id__in=open_ones).values_list("message_id", flat=True)
            )
            waiting = list(self._waiting().values("own_id", "reason", "failures", "crashes", "runs", "due_at", "error")[:9])
            raise AssertionError(
                f"not settled: {kinds}, of these passed over: {ignored}, backlog {self.broker.backlog(self.group)}, {waiting}"
            ) from None
        self.settled_after = time.monotonic() - began_at

    def close(self) -> None:
        self._processes.close()

    def _is_settled(self) -> bool:
        self._keep_running()
        time.sleep(0.2)
        is_left = self._waiting().exists() or sum(self.broker.backlog(self.group).waiting.values())
        return not is_left and len(self._settled()) == len(self.sent)

    def _settled(self) -> set[str]:
        return {message_id for message_id, *_ in self._effects()} | self.dead().keys()

    def _waiting(self) -> QuerySet[Deferred]:
        return Deferred.objects.filter(consumer_group=self.group, dead_at=None)

    def wrong(self) -> list[str]:
        """Return what is not as it should be, a line each."""
        dead, effects = self.dead(), Counter(message_id for message_id, *_ in self._effects())
        found = [f"{effects[one]} times applied: {self.sent[one]}" for one in self.sent if effects[one] > 1]
        for one, (kind, topic, _) in self.sent.items():
            reason = KINDS[kind][1]
            if reason is None and not effects[one]:
                found.append(f"not applied: {kind} on {topic}, dead letter: {dead.get(one)}")
            elif reason is not None and (effects[one] or not re.search(reason, dead.get(one, ""))):
                found.append(f"no dead letter, or a wrong reason: {kind} on {topic}: {dead.get(one)}")
        return found + [
            f"key {key} out of order: {numbers}" for key, numbers in self._steps().items() if numbers != sorted(numbers)
        ]

    def report(self) -> dict[str, Any]:
        """Return figures: messages by kind, acts, and how long healthy ones took."""
        took = sorted(handled - self.sent[one][2] for one, _, _, handled in self._effects() if self.sent[one][0] == "fine")
        return {
            "messages": len(self.sent),
            "kinds": dict(Counter(kind for kind, *_ in self.sent.values())),
            "acts": dict(self.acts),
            "dead letters": len(self.dead()),
            "fine, p50 and slowest (s)": (round(took[len(took) // 2], 2), round(took[-1], 1)),
        }

    def outcome(self, seconds: float) -> Outcome:
        """Return the figures of the report."""
        effects, dead = Counter(message_id for message_id, *_ in self._effects()), self.dead()
        kinds = Counter(kind for kind, *_ in self.sent.values())
        return Outcome(
            run="consumers",
            broker=self.storm["backend"].split(".")[-2],
            seconds=seconds,
            faults={**self.acts, **{fault: kinds[kind] for kind, fault in HARMFUL.items()}},
            messages=len(self.sent),
            lost=len(self.sent.keys() - effects.keys() - dead.keys()),
            ghosts=len(effects.keys() - self.sent.keys()),
            copies=None,
            applied_twice=sum(times > 1 for times in effects.values()),
            out_of_order=sum(later < earlier for numbers in self._steps().values() for earlier, later in pairwise(numbers)),
            settled_seconds=self.settled_after,
        )

    def dead(self) -> dict[str, str]:
        """Return the errors of dead letters by message."""
        dead = Deferred.objects.filter(consumer_group=self.group, dead_at__isnull=False)
        return dict(dead.values_list("own_id", "error"))

    def _effects(self) -> list[tuple[str, str, int, float]]:
        return rows("SELECT message_id, key, number, extract(epoch FROM handled_at)::float8 FROM storm_effect ORDER BY id")

    def _steps(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for _, key, number, _ in self._effects():
            if key:
                found.setdefault(key, []).append(number)
        return found

    def _send(self) -> None:
        number = len(self.sent)
        kind = self.chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        type_ = self.chance.choices(list(TYPES), list(TYPES.values()))[0]
        topic, key = self.work, ""
        if kind in ("fine", "flaky", "later") and self.chance.random() < 0.2:
            type_, topic, key = "Step", self.steps, self.chance.choice(KEYS)
        body = msgspec.json.encode({"do": kind, "number": number})
        headers = {
            Header.TYPE: type_,
            Header.VERSION: "1",
            Header.CONTENT_TYPE: "application/json",
            Header.SOURCE: "urn:uuid:storm",
        }
        message = Outgoing(str(uuid.uuid4()), topic, body, key=key, headers=headers)
        # A broker under load may answer too late; what it then stores twice is a duplicate to the inbox.
        result = wait_until(lambda: next((one for one in self.broker.send([message]) if one.status != "unsure"), None))
        assert result.status == "accepted", result
        self.sent[message.message_id] = (kind, f"{type_} {topic}", time.time())

    def _keep_running(self) -> None:
        for place, process in enumerate(self.processes):
            if process is None or process.poll() is not None:
                self.processes[place] = self._start(release=1 + place % 2)
                self.frozen.pop(place, None)
        for place, thaw_at in list(self.frozen.items()):
            if time.monotonic() >= thaw_at:
                del self.frozen[place]
                self._signal(place, signal.SIGCONT)

    def _start(self, release: int) -> subprocess.Popen[bytes]:
        told = {VARIABLE: json.dumps({**self.storm, "release": release})}
        return self._processes.start("django", "outbox_consume", "--threads", "2", "--group", self.group, **told)

    def _act(self) -> None:
        act = self.chance.choices(list(ACTS), list(ACTS.values()))[0]
        place = self.chance.randrange(PROCESSES)
        self.acts[act] += 1
        if act == "consumer killed":
            self._signal(place, signal.SIGKILL)
        elif act == "consumer stopped" and self._may_stop(place):
            self._signal(place, signal.SIGTERM)
        elif act == "consumer frozen":
            self._signal(place, signal.SIGSTOP)
            self.frozen[place] = time.monotonic() + self.chance.uniform(1, 5)
        elif act == "database session ended":
            with connection.cursor() as cursor:
                cursor.execute(CUT_ONE, [connection.connection.info.backend_pid])
        else:
            deferred = Deferred.objects.filter(consumer_group=self.group)
            if ids := list(deferred.filter(dead_at__isnull=act == "run at once").values_list("id", flat=True)):
                chosen = deferred.filter(id=self.chance.choice(ids))
                list(settle(chosen, Act.REPLAYED if act == "dead letter replayed" else Act.RETRIED_NOW, by="the storm"))

    def _may_stop(self, place: int) -> bool:
        """Return whether another process of the same release is well: what no live process takes is ignored."""
        others = [
            self.processes[other] for other in range(place % 2, PROCESSES, 2) if other != place and other not in self.frozen
        ]
        at_work = set(Process.objects.values_list("pid", flat=True))
        return place not in self.frozen and any(one and one.poll() is None and one.pid in at_work for one in others)

    def _signal(self, place: int, number: int) -> None:
        if (process := self.processes[place]) is not None:
            process.send_signal(number)


# A connection that a handler may be using.
CUT_ONE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = '' AND pid <> %s AND backend_type = 'client backend'
ORDER BY random() LIMIT 1
"""
