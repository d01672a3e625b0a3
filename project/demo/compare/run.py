"""`outbox_demo --compare`: check the options, play the days, and print the results."""

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
    Play the day in three ways and print the results; return the exit code.

    Args:
        options: the options of `outbox_demo`.
        output: the stream for the line of JSON, with `--json`.

    Raises:
        DemoError: an option cannot be used with `--compare`, or the days could not be played.
    """
    _reject_other_options(options)
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


def _reject_other_options(options: Mapping[str, Any]) -> None:
    """Raise DemoError if an option is given that cannot be used with `--compare`."""
    given = {
        "--serve": options["serve"],
        "--no-kills": options["no_kills"],
        "--celery-broker": options["celery_broker"],
        "--broker": options["broker"] != "embedded",
    }
    for name, is_given in given.items():
        if is_given:
            raise DemoError(
                f"{name} cannot be used with --compare, which always starts a RabbitMQ, kills processes, and ends. Omit one."
            )
