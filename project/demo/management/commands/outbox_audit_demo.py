"""`make audit`: audit the demo's history, then inject a loss at each hop and audit it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import psycopg
from django.core.management.base import BaseCommand, CommandError

from project.demo import losses
from project.demo.interrupt import Interrupt
from project.demo.processes import DemoError
from project.demo.screen import Screen
from project.demo.stage import MANAGE, Options, Stage, open_stage
from project.shop.orders_file import DAY, OrdersFileError, read_orders

SETTLE_SECONDS = 1  # short, since no message is in flight after the demo


class Command(BaseCommand):
    help = (
        "Play the demo, audit its history with Spark, then inject a loss at each hop and audit it again. Exit code 1 unless the "
        "first audit finds nothing and the second exactly the injected losses."
    )
    requires_system_checks: list[str] = []  # they may need a database, which the demo creates later

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one line of JSON at the end, progress to stderr")
        parser.add_argument("--orders", type=Path, default=DAY, metavar="FILE", help="another file of this format")
        parser.add_argument("--kills", action="store_true", help="kill relays and consumers, as `make demo` does")
        parser.add_argument(
            "--reader", choices=["jdbc", "python"], default="python", help="jdbc needs the jar of PostgreSQL's driver"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        screen = Screen(sys.stderr if options["json"] else sys.stdout)
        try:
            chosen = Options(invoices=read_orders(options["orders"]), with_kills=options["kills"])
            with open_stage(chosen, screen, Interrupt()) as stage:
                stage.play()
                stage.stop()
                outcome = _audit_twice(stage, screen, options["reader"])
        except (DemoError, OrdersFileError) as error:
            raise CommandError(str(error)) from error
        if options["json"]:
            self.stdout.write(json.dumps(outcome))
        if outcome["before"] or outcome["missed"] or outcome["invented"]:
            raise SystemExit(1)


def _audit_twice(stage: Stage, screen: Screen, reader: str) -> dict[str, Any]:
    screen.say("auditing the history as is")
    before = [finding["text"] for finding in _audit(stage, reader)["findings"]]
    for text in before:
        screen.write(f"  FOUND, although nothing was lost: {text}")
    with psycopg.connect(stage.database_url, autocommit=True) as connection:
        expected = losses.together(losses.inject(connection))
    screen.say(f"injected losses: {len(expected)} findings expected; auditing again")
    found = sorted((losses.as_expected(finding) for finding in _audit(stage, reader)["findings"]), key=str)
    missed = [str(loss) for loss in expected if loss not in found]
    invented = [str(loss) for loss in found if loss not in expected]
    for loss in expected:
        screen.write(f"  {'MISSED' if str(loss) in missed else 'found '}  {loss}")
    for text in invented:
        screen.write(f"  INVENTED  {text}")
    screen.say(f"{len(expected) - len(missed)} of {len(expected)} losses found, {len(invented)} invented")
    return {"before": before, "expected": len(expected), "missed": missed, "invented": invented}


def _audit(stage: Stage, reader: str) -> dict[str, Any]:
    """Run `outbox_audit` as an operator would, on the demo's database."""
    command = [*MANAGE, "outbox_audit", "--json", "--settle", str(SETTLE_SECONDS), "--reader", reader]
    outcome = subprocess.run(command, env={**os.environ, **stage.processes.environment}, stdout=subprocess.PIPE, text=True)
    if outcome.returncode not in (0, 1):
        raise DemoError(f"The audit failed: exit code {outcome.returncode}.")
    report: dict[str, Any] = json.loads(outcome.stdout)
    return report
