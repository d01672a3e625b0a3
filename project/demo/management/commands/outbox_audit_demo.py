"""`make audit`: the demo's history, audited as is, then again with a loss injected at each hop."""

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

SETTLE_SECONDS = 1  # all work is done when the demo is over


class Command(BaseCommand):
    help = (
        "Play the demo, audit its history by Spark, then inject a loss at each hop and audit again. Exit code 1 unless the "
        "first audit finds nothing and the second exactly the injected losses."
    )
    requires_system_checks: list[str] = []  # they may need a database, which the demo creates first

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one line of JSON at the end, progress to stderr")
        parser.add_argument("--orders", type=Path, default=DAY, metavar="FILE", help="another file of this format")
        parser.add_argument("--kills", action="store_true", help="kill relays and consumers, as `make demo` does")
        parser.add_argument("--reader", choices=["jdbc", "python"], default="python", help="jdbc needs the driver's jar")

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
    before = [one["text"] for one in _audit(stage, reader)["findings"]]
    for text in before:
        screen.write(f"  FOUND, but nothing was lost: {text}")
    with psycopg.connect(stage.database_url, autocommit=True) as connection:
        expected = losses.together(losses.inject(connection))
    screen.say(f"injected losses: {len(expected)} findings expected; auditing again")
    found = sorted((losses.as_expected(one) for one in _audit(stage, reader)["findings"]), key=str)
    missed, invented = [str(one) for one in expected if one not in found], [str(one) for one in found if one not in expected]
    for one in expected:
        screen.write(f"  {'MISSED' if str(one) in missed else 'found '}  {one}")
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
