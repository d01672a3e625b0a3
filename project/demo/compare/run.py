"""`outbox_demo --compare`: check the options, play, print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.core.management.base import OutputWrapper

from project.demo.compare import report
from project.demo.compare.stage import Options, play
from project.demo.compare.ways import OUTBOX
from project.demo.interrupt import Interrupt
from project.demo.processes import DemoError
from project.demo.screen import Screen
from project.shop.orders_file import read_orders


def run(options: Mapping[str, Any], screen: Screen, output: OutputWrapper) -> int:
    """
    Play the day three ways and print what came of it; return the exit code.

    Args:
        options: those of `outbox_demo`.
        output: where one line of JSON goes, with `--json`.
    """
    _refuse_others(options)
    chosen = Options(read_orders(options["orders"]), options["port"], options["seed"])
    days = play(chosen, screen, Interrupt())
    missing, is_kept = report.missing(days), days[OUTBOX.name].is_kept
    screen.write(f"\n{report.table(days)}\n")
    for text in missing:
        screen.write(f"Not shown this time: {text}.")
    if not is_kept:
        screen.write("The promise of the outbox is BROKEN.")
    elif not missing:
        screen.write("Only the outbox lost nothing, made no ghosts and applied nothing twice.")
    if options["json"]:
        output.write(json.dumps(report.as_dict(days)))
        output.flush()
    return int(bool(missing) or not is_kept)


def _refuse_others(options: Mapping[str, Any]) -> None:
    """Raise DemoError for options that have no meaning here."""
    given = {
        "--serve": options["serve"],
        "--no-kills": options["no_kills"],
        "--celery-broker": options["celery_broker"],
        "--broker": options["broker"] != "embedded",
    }
    for name, is_given in given.items():
        if is_given:
            raise DemoError(f"--compare cannot have {name}: it starts a RabbitMQ, kills on it, and ends. Omit one of the two.")
