"""The command of `make demo` and `make serve`."""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from project.demo.brokers import DemoBroker, Embedded
from project.demo.compare.run import run as compare
from project.demo.interrupt import Interrupt, Interrupted
from project.demo.processes import DemoError
from project.demo.rabbitmq import RabbitMQ
from project.demo.rocketmq import OTHER_SECONDS, Node, RocketMQ
from project.demo.screen import Screen, table
from project.demo.stage import Options, Stage, open_stage
from project.shop.orders_file import DAY, OrdersFileError, read_orders

ADMIN = "admin"


def _broker(name: str, node: str) -> DemoBroker:
    """
    Return the chosen broker.

    Raises:
        DemoError: `node` does not have the form PROXY,NAME_SERVER.
    """
    if name == "embedded":
        return Embedded()
    if name == "rabbitmq":
        return RabbitMQ()
    if name == "kafka":
        from project.demo.kafka import Kafka  # its client is an extra

        return Kafka()
    if not node:
        return RocketMQ()
    proxy, _, name_server = node.partition(",")
    if not re.fullmatch(r"[^,\s]+:\d+,[^,\s]+:\d+", node):
        raise DemoError(f"--rocketmq {node}: give the addresses of proxy and name server, like 127.0.0.1:8081,127.0.0.1:9876.")
    return RocketMQ(Node(proxy, name_server, OTHER_SECONDS))


class Command(BaseCommand):
    help = (
        "Replay a day of real orders through the shop while relays and consumers are killed, and report from the database "
        "how many messages were lost, seen without being committed, or applied twice. Exit code 1 unless there were none."
    )
    requires_system_checks: list[str] = []  # they may need a database, which the demo creates later

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one line of JSON at the end, progress to stderr")
        parser.add_argument("--serve", action="store_true", help="leave shop and admin running afterwards, until Ctrl-C")
        parser.add_argument(
            "--orders", type=Path, default=DAY, metavar="FILE", help="another file of this format, .csv or .csv.gz"
        )
        parser.add_argument(
            "--seed", type=int, default=1, metavar="N", help="chooses the orders whose payment is declined (default: 1)"
        )
        parser.add_argument("--no-kills", action="store_true", help="kill no process")
        parser.add_argument(
            "--compare",
            action="store_true",
            help="play the day in three ways on a RabbitMQ that is started, which needs rabbitmq-server: with task.delay() in "
            "the transaction, with transaction.on_commit(task.delay), and with the outbox. Exit code 1 unless only the outbox "
            "keeps the promise",
        )
        parser.add_argument(
            "--port", type=int, default=8000, metavar="N", help="the web server's port, or the next free one (default: 8000)"
        )
        parser.add_argument(
            "--broker",
            choices=["embedded", "rocketmq", "rabbitmq", "kafka"],
            default="embedded",
            help="the broker of the messages (default: embedded). rocketmq starts a RocketMQ, which needs Java and Maven; "
            "rabbitmq starts a RabbitMQ, which needs rabbitmq-server, and kills it once; kafka starts a Kafka, which needs Java "
            "and Maven, and kills it once",
        )
        parser.add_argument(
            "--rocketmq",
            default=os.environ.get("DEMO_ROCKETMQ_NODE", ""),
            metavar="PROXY,NAME_SERVER",
            help="use a running RocketMQ, such as 127.0.0.1:8081,127.0.0.1:9876; the shop's topics must be empty there "
            "(default: the environment variable DEMO_ROCKETMQ_NODE)",
        )
        parser.add_argument(
            "--celery-broker",
            default="",
            metavar="URL",
            help="Redis or RabbitMQ for Celery (default: files; with --broker rabbitmq, the RabbitMQ that is started)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        screen = Screen(sys.stderr if options["json"] else sys.stdout)
        try:
            if options["compare"]:
                sys.exit(compare(options, screen, self.stdout))
            chosen = Options(
                invoices=read_orders(options["orders"]),
                port=options["port"],
                celery_broker=options["celery_broker"],
                seed=options["seed"],
                with_kills=not options["no_kills"],
                broker=_broker(options["broker"], options["rocketmq"]),
            )
            code = self._run(chosen, screen, as_json=options["json"], serve=options["serve"])
        except (DemoError, OrdersFileError) as error:
            raise CommandError(str(error)) from error
        sys.exit(code)

    def _run(self, options: Options, screen: Screen, *, as_json: bool, serve: bool) -> int:
        """Play the demo and print its report; return the exit code."""
        with open_stage(options, screen, Interrupt()) as stage:
            stage.play()
            if not serve:
                stage.stop()
            report = stage.read_report()
            missing = report.missing() if options.with_kills else []
            screen.write(f"\n{table(report)}\n")
            for text in missing:
                screen.write(f"Not shown this time: {text}.")
            if as_json:
                self.stdout.write(json.dumps({**report.as_dict(), "missing": missing}))
                self.stdout.flush()
            if serve:
                self._serve(stage)
        if not report.is_kept:
            screen.write("The promise is BROKEN.")
        elif missing:
            screen.write("The promise is kept, but not all was shown.")
        else:
            screen.write("The promise is kept. Next: make serve (the same, but the admin keeps running), make test, README.md")
        return int(bool(missing) or not report.is_kept)

    def _serve(self, stage: Stage) -> None:
        password = stage.add_admin(ADMIN)
        stage.screen.write(f"Admin:  {stage.address}/admin/   user {ADMIN}, password {password}")
        stage.screen.write("Ctrl-C stops everything and deletes it.")
        with suppress(Interrupted):
            stage.stay()
        stage.stop()
