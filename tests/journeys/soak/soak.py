"""
A soak, played by `make soak SECONDS=1800 BROKER=embedded`; pytest does not find it of itself.

Messages are published at a steady rate and handled; some fail once, some become dead letters and are replayed, some are delayed.
Days last a minute (`days.py`), so partitions are created and dropped. Once a minute a process is killed; a consumer that follows
is of the other one of two releases, and the older one has no handler for one of the types. Beside those that are killed, one
process of each kind lives as long as the soak, and its memory is measured.

It fails where something was lost or doubled, and where a figure at the end is beyond its bound (`bounds.py`).
"""

import json
import os
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from outbox.models import MessageState, Process
from tests.journeys.outcome import Outcome
from tests.journeys.processes import Processes, send
from tests.journeys.soak.bounds import Figures, as_text, compare
from tests.journeys.soak.brokers import SERVERS, Server
from tests.journeys.soak.given import FIRST_DAY, VARIABLE
from tests.journeys.soak.measure import measure
from tests.journeys.tables import rows
from tests.waiting import wait_until

BROKER = os.environ.get("SOAK_BROKER", "embedded")
SECONDS = float(os.environ.get("SOAK_SECONDS", 1800))
JSON = os.environ.get("SOAK_JSON", "")  # a path for the result
PATIENCE = 300  # seconds until all is settled
LEVEL_AFTER = 300  # seconds; by then, days have been dropped

RATES = {"publisher": 15, "killed publisher": 5}  # messages a second
MEASURE_EVERY = 30  # seconds
KILL_EVERY = 60
NOTE_EVERY = 10  # well within the broker's retention
START_SECONDS = 120

PACKAGE = "tests.journeys.soak"

TABLES = """
CREATE TABLE soak_published (number bigint PRIMARY KEY, topic text, kind text);
CREATE TABLE soak_effect (id bigserial, number bigint, topic text, key text, at timestamptz DEFAULT clock_timestamp());
CREATE INDEX ON soak_effect (number);
CREATE TABLE soak_replayed (message_id text PRIMARY KEY);
CREATE TABLE soak_discarded (message_id text PRIMARY KEY)
"""
# How long after the first effect of a message the last one came, in seconds: beyond the retention, its inbox row was gone.
APART = "SELECT extract(epoch FROM max(at) - min(at))::int FROM soak_effect GROUP BY number HAVING count(*) > 1"

DROP = "DROP TABLE IF EXISTS soak_published, soak_effect, soak_replayed, soak_discarded, soak_copy"

# "bad" are those whose dead letters are discarded.
IS_SETTLED = """
SELECT NOT EXISTS (SELECT number FROM soak_published WHERE kind <> 'bad' EXCEPT SELECT number FROM soak_effect)
    AND (SELECT count(*) FROM soak_published WHERE kind = 'bad') <= (SELECT count(*) FROM soak_discarded)
    AND NOT EXISTS (SELECT FROM outbox_message_state WHERE state <> 'sent')
"""

# Tables that are vacuumed after 20,000 dead rows, which would come after half an hour.
VACUUM_SOON = """
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT oid::regclass FROM pg_class WHERE 'autovacuum_vacuum_threshold=20000' = ANY(reloptions) LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_vacuum_threshold = 500)', name);
    END LOOP;
END $$
"""

LIST_DAYS = """
SELECT relname FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
WHERE inhparent = 'outbox_message'::regclass AND relname <> 'outbox_message_default' ORDER BY relname
"""


class Soak:
    """Keeps processes running, kills some, and measures."""

    def __init__(self, server: Server, folder: Path, unique: str) -> None:
        self.server = server
        self.processes = Processes(folder, f"{PACKAGE}.settings")
        self.samples: list[tuple[float, Figures]] = []
        self.kills: Counter[str] = Counter()
        self._numbers = iter(range(1, 10**12, 10**6))
        self._began_at = time.monotonic()
        self._given = {**server.given, "unique": unique, "began_at": int(time.time())}
        self._releases = cycle(["old", "new"])
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """Start the processes: publishers when messages have partitions and handlers, so that none waits for them."""
        self._run("relay", "killed relay")
        wait_until(lambda: len(_days()) > 1, START_SECONDS)
        self._run(
            "consumer", "killed consumer", "replays", *(["checker", "killed checker"] if self.server.asks_producers else [])
        )
        wait_until(lambda: Process.objects.filter(kind="consumer").count() == 2, START_SECONDS)
        self._run(*RATES)
        self._began_at = time.monotonic()

    def play(self, seconds: float) -> None:
        """Measure, note and kill, each after its interval."""
        victims = cycle([name for name in self.running if name.startswith("killed")])
        acts: dict[float, Callable[[], object]] = {
            NOTE_EVERY: self.server.note,
            MEASURE_EVERY: self._measure,
            KILL_EVERY: lambda: self._kill(next(victims)),
        }
        due = {every: float(every) for every in acts}
        while (now := time.monotonic() - self._began_at) < seconds:
            self._require_running()
            for every, act in acts.items():
                if now >= due[every]:
                    act()
                    due[every] += every
            time.sleep(0.2)
        if not self.samples or self.samples[-1][0] < seconds - MEASURE_EVERY / 2:
            self._measure()

    def settle(self) -> None:
        """Publish no more, and wait until each message is sent, and applied or discarded."""
        for name in RATES:
            self._end(name)
            del self.running[name]

        def is_settled() -> bool:
            self._require_running()
            self.server.note()
            time.sleep(1)
            return rows(IS_SETTLED) == [(True,)]

        with suppress(AssertionError):
            wait_until(is_settled, PATIENCE)

    def close(self) -> None:
        self.processes.close()

    def _run(self, *names: str) -> None:
        for name in names:
            self.running[name] = self._start(name)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        def start(*command: str, release: str = "new") -> subprocess.Popen[bytes]:
            return self.processes.start(*command, **{VARIABLE: json.dumps({**self._given, "release": release})})

        match name.removeprefix("killed "):
            case "relay":
                return start(f"{PACKAGE}.relay")
            case "consumer":
                command = ("django", "outbox_consume", "--threads", "2", "--group", self.server.names.group)
                return start(*command, release="new" if name == "consumer" else next(self._releases))
            case "checker":
                return start("django", "outbox_checker")
            case "replays":
                return start(f"{PACKAGE}.replays")
            case _:
                return start(f"{PACKAGE}.publisher", str(next(self._numbers)), str(RATES[name]))

    def _measure(self) -> None:
        lasting = {name: process.pid for name, process in self.running.items() if not name.startswith("killed")}
        self.samples.append((time.monotonic() - self._began_at, measure(lasting)))

    def _kill(self, name: str) -> None:
        print(f"{time.strftime('%X')} {name}", flush=True)  # noqa: T201
        self._end(name)
        self.kills[f"{name.removeprefix('killed ')} killed"] += 1
        self._run(name)

    def _end(self, name: str) -> None:
        send(self.running[name], signal.SIGKILL)
        self.running[name].wait()

    def _require_running(self) -> None:
        ended = [name for name, process in self.running.items() if process.poll() is not None]
        assert not ended, f"ended by themselves: {', '.join(ended)}"


class Count:
    """What a soak has left behind, once it is settled."""

    def __init__(self, soak: Soak) -> None:
        self.server = soak.server
        self.published = {number: (topic, kind) for number, topic, kind in rows("SELECT number, topic, kind FROM soak_published")}
        self.effects = Counter(_numbers("SELECT number FROM soak_effect"))
        self.copies = self.server.copies()
        [(self.discarded,)] = rows("SELECT count(*) FROM soak_discarded")

    def report(self) -> dict[str, int]:
        """Return the figures."""
        bad = {number for number, (_, kind) in self.published.items() if kind == "bad"}
        counted = {number for number, (topic, _) in self.published.items() if topic in self.copies}
        copies = sum(self.copies.values(), Counter())
        keys: dict[str, list[int]] = {}
        for key, number in rows("SELECT key, number FROM soak_effect WHERE topic = %s ORDER BY id", [self.server.names.steps]):
            keys.setdefault(key, []).append(number)
        return {
            "committed": len(self.published),
            "copies at the broker": copies.total(),
            "applied": len(self.effects),
            "discarded dead letters": self.discarded,
            "not sent": MessageState.objects.exclude(state="sent").count(),
            "lost before the broker": len(counted - copies.keys()),
            "lost after it": len(self.published.keys() - bad - self.effects.keys()) + max(0, len(bad) - self.discarded),
            "ghosts": len((copies.keys() | self.effects.keys()) - self.published.keys()),
            "applied though bad": len(bad & self.effects.keys()),
            "applied twice": sum(times > 1 for times in self.effects.values()),
            "copied twice": sum(times > 1 for times in copies.values()),
            "keys out of order": sum(numbers != sorted(numbers) for numbers in keys.values()),
        }

    def wrong(self) -> dict[str, int]:
        """Return the figures that have to be 0, and are not."""
        report = self.report()
        fine = {"committed", "copies at the broker", "applied", "discarded dead letters"}
        return {name: value for name, value in report.items() if value and name not in fine and not self._is_allowed(name)}

    def _is_allowed(self, name: str) -> bool:
        return name == "copied twice" and self.server.doubles


@pytest.fixture
def soak(tmp_path: Path, transactional_db: None) -> Iterator[Soak]:
    assert BROKER in SERVERS, f"SOAK_BROKER={BROKER}: choices are {', '.join(SERVERS)}"
    unique = uuid.uuid4().hex[:8]
    server = SERVERS[BROKER](unique)
    _drop_days()
    with connection.cursor() as cursor:
        cursor.execute(TABLES)
        cursor.execute(VACUUM_SOON)
    server.open()
    with closing(Soak(server, tmp_path, unique)) as soak:
        yield soak
        print(soak.processes.logs())  # noqa: T201  (pytest shows it where the test failed)
    with connection.cursor() as cursor:
        cursor.execute(DROP)
    _drop_days()


@pytest.mark.timeout(SECONDS + PATIENCE + 600)
def test_nothing_grows(soak: Soak):
    soak.begin()
    soak.play(SECONDS)
    days = _days()
    soak.settle()

    count = Count(soak)
    rows = compare(soak.samples, min(LEVEL_AFTER, SECONDS / 2))
    report = count.report()
    more = {"kills": soak.kills, "seconds between effects": _numbers(APART)}
    print(f"\n{as_text(rows)}\n\n{json.dumps(report | more, indent=1)}")  # noqa: T201  (with -s)
    Outcome(
        run="soak",
        broker=BROKER,
        seconds=SECONDS,
        faults=soak.kills,
        messages=report["committed"],
        lost=report["lost before the broker"] + report["lost after it"],
        ghosts=report["ghosts"],
        copies=report["copied twice"],
        applied_twice=report["applied twice"],
        out_of_order=report["keys out of order"],
        settled_seconds=None,
    ).write()
    if JSON:
        _write(soak, [row.as_json() for row in rows], report)
    assert count.wrong() == {}
    assert [f"{row.kind}: {row.subject}" for row in rows if row.is_over] == []
    assert report["committed"] > SECONDS * sum(RATES.values()) / 2
    assert days[0] > f"outbox_message_{FIRST_DAY:%Y%m%d}" or SECONDS < LEVEL_AFTER, "no day was dropped"


def _write(soak: Soak, rows: list[dict[str, Any]], report: dict[str, int]) -> None:
    samples = [
        {"seconds": round(seconds), **{": ".join(one): round(value, 2) for one, value in figures.items()}}
        for seconds, figures in soak.samples
    ]
    found = {"broker": BROKER, "seconds": SECONDS, "kills": soak.kills, "count": report, "rows": rows, "samples": samples}
    Path(JSON).write_text(json.dumps(found, indent=1))


def _days() -> list[str]:
    return [name for (name,) in rows(LIST_DAYS)]


def _drop_days() -> None:
    with connection.cursor() as cursor:
        for name in _days():
            cursor.execute(f"DROP TABLE {name}")


def _numbers(statement: str) -> list[int]:
    return [number for (number,) in rows(statement)]
