"""
Measure, print a table, write JSON.

    python -m benchmarks                    all, on a PostgreSQL started for it (or DATABASE_URL)
    python -m benchmarks publish relay      only these
    python -m benchmarks rocketmq           against a RocketMQ started for it; needs Java, Maven and `make .venv/.rocketmq`
    python -m benchmarks kafka              against a Kafka started for it; needs Java, Maven and `make .venv/.kafka`
    python -m benchmarks celery_tasks       against a RabbitMQ started for it; needs rabbitmq-server
    python -m benchmarks archive spark      the archive and the audit; needs Java, its JDBC driver and `make .venv/.bench`
    python -m benchmarks peers              other packages beside ours; needs `make .peers/.installed`
    python -m benchmarks --quick            a tenth of the messages: whether it runs, not how fast
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import django
from django.core.management import call_command

from benchmarks.figure import Figure, table
from outbox.testing.postgres import Postgres

# Where a measurement stands, if not in a file of its name.
MODULES = {"peers": "benchmarks.peers.compare"}

# Not among all: it needs an environment of its own.
EXTRA = ("peers",)

NAMES = (
    "publish",
    "relay",
    "embedded",
    "consume",
    "trickle",
    "memory",
    "latency",
    "scale",
    "takeover",
    "rabbitmq",
    "rocketmq",
    "kafka",
    "celery_tasks",
    "spark",
    "archive",
    "start",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the hot path.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which ones: {', '.join((*NAMES, *EXTRA))} (default: all but the last)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages")
    parser.add_argument("--json", type=Path, default=Path("var/bench.json"), metavar="FILE", help="default: var/bench.json")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args()
    if unknown := set(options.names) - {*NAMES, *EXTRA}:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}. There are {', '.join((*NAMES, *EXTRA))}.")

    with _server() as server:
        if isinstance(server, Postgres):
            os.environ["DATABASE_URL"] = server.url
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
        django.setup()
        call_command("migrate", verbosity=0)
        figures = _run(options.names or NAMES, 0.1 if options.quick else 1.0)

    _write(options.json, figures, is_quick=options.quick)
    print(table(figures))
    print(f"\nWritten to {options.json}")
    return int(options.strict and not all(figure.is_met for figure in figures))


def _server() -> AbstractContextManager[Postgres | None]:
    """Start a server that waits for the disk at each commit, as a production server does."""
    return nullcontext() if "DATABASE_URL" in os.environ else Postgres(durable=True)


def _run(names: tuple[str, ...] | list[str], scale: float) -> list[Figure]:
    figures: list[Figure] = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures += import_module(MODULES.get(name, f"benchmarks.{name}")).measure(scale)
    return figures


def _write(path: Path, figures: list[Figure], *, is_quick: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "measured_at": datetime.now(UTC).isoformat(),
        "is_quick": is_quick,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "django": django.get_version(),
        "figures": [figure.as_dict() for figure in figures],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
