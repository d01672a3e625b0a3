"""
Run what attacks the outbox, and write `docs/report.md` and `docs/report.json`. `make report`.

Each run leaves a file in `var/report`, so single runs can be repeated; the page is written from all of them.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outbox.testing.postgres import Postgres
from tests.journeys.outcome import VARIABLE, Outcome
from tests.report.page import page

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "var/report"
PAGE, DATA = ROOT / "docs/report.md", ROOT / "docs/report.json"
SECONDS = 300
PYTEST = ("-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "-s")
EXPLORER, MUTANTS = "explorer", "mutants"


@dataclass(frozen=True, slots=True)
class Run:
    """
    A run of the report.

    Args:
        arguments: of Python.
        environment: more variables; a storm gets its seconds as it wants them.

    In both, `{seconds}` and `{json}` are put in.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def storm(path: str, marker: str = "", nodes: int = 1) -> Run:
    """Return the run of a storm's file; the marker is also the broker of the storm over consumers."""
    return Run(
        (*PYTEST, *(("-m", marker) if marker else ()), path), {"STORM_NODES": str(nodes), "STORM_BROKER": marker or "embedded"}
    )


def soak(broker: str) -> Run:
    """Return the run of the soak on a broker; its days last a minute, and some have to be dropped."""
    return Run((*PYTEST, "tests/journeys/soak/soak.py"), {"SOAK_BROKER": broker, "SOAK_SECONDS": "1800", "SOAK_JSON": ""})


def foreign(broker: str) -> Run:
    """Return the run that puts messages of random bytes between good ones."""
    return Run((*PYTEST, "-m", broker, "tests/outbox/brokers/test_foreign_messages.py"), {"FUZZ_ODD": "10000"})


def demo(broker: str) -> Run:
    """Return the run of the demo on a broker."""
    return Run(("manage.py", "outbox_demo", "--json", "--broker", broker))


RUNS = {
    "demo on embedded": demo("embedded"),
    "demo on Kafka": demo("kafka"),
    "demo on RabbitMQ": demo("rabbitmq"),
    "demo on RocketMQ": demo("rocketmq"),
    "storm on Kafka": storm("tests/journeys/kafka/test_storm.py", "kafka"),
    "storm on Kafka, 3 nodes": storm("tests/journeys/kafka/test_storm.py", "kafka", nodes=3),
    "storm on RabbitMQ": storm("tests/journeys/rabbitmq/test_storm.py"),
    "storm on RabbitMQ, 3 nodes": storm("tests/journeys/rabbitmq/test_storm.py", nodes=3),
    "storm on RocketMQ": storm("tests/journeys/rocketmq/storm.py", "rocketmq"),
    "storm on RocketMQ, 3 nodes": storm("tests/journeys/rocketmq/storm.py", "rocketmq", nodes=3),
    "consumers on embedded": storm("tests/journeys/consumers/test_storm.py"),
    "consumers on Kafka": storm("tests/journeys/consumers/test_storm.py", "kafka"),
    "consumers on RocketMQ": storm("tests/journeys/consumers/test_storm.py", "rocketmq"),
    "soak on embedded": soak("embedded"),
    "soak on Kafka": soak("kafka"),
    "soak on RabbitMQ": soak("rabbitmq"),
    "soak on RocketMQ": soak("rocketmq"),
    "tasks on RabbitMQ and Redis": storm("tests/journeys/celery_storm/test_storm.py"),
    "foreign bytes on Kafka": foreign("kafka"),
    "foreign bytes on RabbitMQ": foreign("rabbitmq"),
    "foreign bytes on RocketMQ": foreign("rocketmq"),
    "foreign requests": Run((*PYTEST, "tests/outbox/api/fuzz"), {"FUZZ_REQUESTS": "20000", "FUZZ_JSON": "{json}"}),
    EXPLORER: Run(("-m", "tests.explorer", "--seconds", "{seconds}", "--json", "{json}")),
    MUTANTS: Run(("-m", "tests.mutants", "--json", "{json}")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen, and write the page. Return the exit code: 1 if a run has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.report", description="Attack the outbox, and write docs/report.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these runs; 'none' only writes the page (default: all)")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"of faults in each run (default: {SECONDS})")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*RUNS, "none"}:
        parser.error(f"there is no run {', '.join(sorted(unknown))}. Choices are: {', '.join(RUNS)}.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in options.names or RUNS:
        if name != "none":
            _run(name, options.seconds)
    records = {name: json.loads(path.read_text()) for name in RUNS if (path := _path(name)).exists()}
    versions = _versions()
    PAGE.write_text(page(records, versions))
    DATA.write_text(json.dumps({"versions": versions, "runs": records}, indent=1) + "\n")
    print(f"Written to {PAGE.relative_to(ROOT)} and {DATA.relative_to(ROOT)}")
    return int(any(record["exit_code"] for record in records.values()))


def _path(name: str, suffix: str = ".json") -> Path:
    return FOLDER / (name.lower().replace(",", "").replace(" ", "-") + suffix)


def _run(name: str, seconds: int) -> None:
    """Run one, and write its record. What it prints goes to a file beside."""
    run, outcomes, found = RUNS[name], _path(name, ".outcomes"), _path(name, ".found")
    for old in (outcomes, found):
        old.unlink(missing_ok=True)
    more = {name: value.format(seconds=seconds, json=found) for name, value in run.environment.items()}
    environment = {**os.environ, **more, "STORM_SECONDS": str(seconds), VARIABLE: str(outcomes)}
    command = [sys.executable, *(part.format(seconds=seconds, json=found) for part in run.arguments)]
    print(f"{time.strftime('%X')} {name}", flush=True)
    began_at = time.monotonic()
    with _path(name, ".log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        log.write(done.stdout)
    record: dict[str, Any] = {
        "at": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _output("git", "rev-parse", "--short=8", "HEAD"),
        "seconds": round(time.monotonic() - began_at),
        "exit_code": done.returncode,
        "outcomes": [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else [],
        "found": json.loads(found.read_text()) if found.exists() else None,
    }
    if run.arguments[0] == "manage.py" and done.stdout.strip():
        record["outcomes"] = [_outcome_of_demo(run.arguments[-1], json.loads(done.stdout.splitlines()[-1])).as_dict()]
    _path(name).write_text(json.dumps(record, indent=1))


def _outcome_of_demo(broker: str, report: dict[str, Any]) -> Outcome:
    kills = report["kills_by"]
    return Outcome(
        run="demo",
        broker=broker,
        seconds=None,
        faults={
            "relay killed": kills["long_running"] + kills["celery"],
            "consumer killed": kills["consumers"],
            "broker killed": int(report["outage"] is not None),
            "orders rolled back": report["rolled_back"],
        },
        messages=report["published"],
        lost=report["lost"],
        ghosts=report["ghosts"],
        copies=report["duplicate_copies"],
        applied_twice=report["applied_twice"],
        out_of_order=None,
        settled_seconds=None,
    )


def _versions() -> dict[str, str]:
    """Return the versions of what was attacked."""
    found = {"Python": platform.python_version()}
    found |= {name: version(name) for name in ("Django", "celery", "psycopg", "djangorestframework", "msgspec")}
    with Postgres() as server:
        found["PostgreSQL"] = _number(server.version)
    found |= {"Kafka": _in_pom("kafka", "<version>4"), "RocketMQ": _in_pom("rocketmq", "<rocketmq.version>")}
    return found | {
        "RabbitMQ": _number(_output("rabbitmqctl", "version")),
        "Redis": _number(_output("redis-server", "--version")),
    }


def _number(text: str) -> str:
    found = re.search(r"\d+(\.\d+)+", text)
    return found[0] if found else "(not found)"


def _in_pom(server: str, before: str) -> str:
    text = (ROOT / f"project/servers/{server}_pom.xml").read_text()
    return _number(text[text.index(before) :])


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
