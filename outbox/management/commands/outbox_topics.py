"""List the resources that topics need at their brokers, and create missing ones."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
from django.core.management.base import BaseCommand
from msgspec.structs import replace

from outbox import conf
from outbox.brokers.base import ServerResource
from outbox.brokers.capabilities import ListsResources, TransactionalSends
from outbox.database.identity import read_identity
from outbox.errors import BrokerMisconfigured, BrokerUnavailable, NotMigrated, OutboxError, TablesLocked
from outbox.extensions import extensions
from outbox.logs import line_of
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.monitoring.connection import connected
from outbox.relay.hosts import relay_targets

DONE = {"there", "created"}
HOW_TO_CREATE = "Run manage.py outbox_topics --create to create what is missing."
NEVER_CHANGED = (
    "What differs was left as it is: correct the settings, or change it with the server's own tools, unless a line above says "
    "otherwise."
)


Shown = tuple[ServerResource, str]  # a resource and its state; the resource's `trouble` also says why it was not created
SHOWN_FIELDS = "kind", "name", "place", "wanted", "differences", "trouble"


class Command(BaseCommand):
    help = (
        "List the topics, groups and queues that the settings' topics and the consumer groups in code need at the brokers, with "
        "their settings, and whether they exist. With --create, create missing ones; existing ones are never changed. "
        "Exit code: 0 all exist, 1 something is missing or different, or some brokers cannot be asked, 2 none can be asked, or "
        "refused."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--broker", action="append", metavar="ALIAS", help="may be repeated (default: all that have topics)")
        parser.add_argument("--create", action="store_true", help="create missing topics, groups and queues")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        try:
            targets = relay_targets(only_brokers=options["broker"])
            listed = {}
            for alias in sorted({target.broker for target in targets}):
                databases = [target.database for target in targets if target.broker == alias]
                listed[alias] = _list_or_create(alias, databases, create=options["create"])
        except OutboxError as error:
            raise unable(error) from error
        if options["json"]:
            brokers = [
                {"broker": alias, "resources": [_as_dict(*shown) for shown in resources], "troubles": troubles}
                for alias, (resources, troubles) in listed.items()
            ]
            self.stdout.write(json.dumps({"brokers": brokers}))
        else:
            self.stdout.write("\n\n".join(_as_text(listed, create=options["create"])) or "There are no topics in settings.")
        states = {state for resources, _ in listed.values() for _, state in resources}
        if states - DONE or any(troubles for _, troubles in listed.values()):
            raise SystemExit(1 if states else 2)


def _list_or_create(alias: str, databases: Collection[str], *, create: bool) -> tuple[list[Shown], list[str]]:
    """Create missing resources of a broker if `create`; return all, and sentences that say why some are not listed."""
    troubles: list[str] = []
    listed: list[ServerResource] = []
    outcomes: dict[str, str] = {}
    with closing(conf.make_broker(alias)) as broker:
        if not ListsResources.has(broker):
            return [], []
        sources = _read_sources(databases, troubles) if TransactionalSends.has(broker) else []
        find = partial(
            ListsResources.of(broker).list_resources,
            sources=sources,
            lanes=conf.settings().relay.lanes,
            readers=sorted({group for extension in extensions() for group in extension.consumer_groups(alias)}),
        )
        try:
            listed = find()
            if create:
                _create_missing(listed, outcomes)
                listed = find()
        except BrokerUnavailable as error:
            troubles.append(str(error))
    return [_shown(resource, outcomes.get(_id(resource))) for resource in listed], troubles


def _create_missing(listed: Collection[ServerResource], outcomes: dict[str, str]) -> None:
    """
    Create missing resources; add to `outcomes`, under the resource's `_id`, why the server refused it, or "" if it was created.

    Raises:
        BrokerUnavailable: the server does not answer any more.
    """
    for resource in listed:
        if resource.exists is False:
            try:
                resource.create()
                outcomes[_id(resource)] = ""
            except BrokerMisconfigured as error:
                outcomes[_id(resource)] = str(error)


def _id(resource: ServerResource) -> str:
    return f"{resource.kind} {resource.name} {resource.place}"


def _shown(resource: ServerResource, outcome: str | None) -> Shown:
    if resource.differences:
        state = "different"
    elif outcome == "":  # it was created, even if another node of a cluster does not list it yet
        state = "created"
    elif resource.exists is None:
        state = "unknown"
    else:
        state = "there" if resource.exists else "missing"
    return replace(resource, trouble=resource.trouble or outcome or ""), state


def _as_dict(resource: ServerResource, state: str) -> dict[str, Any]:
    return {name: getattr(resource, name) for name in SHOWN_FIELDS} | {"state": state}


def _read_sources(databases: Collection[str], troubles: list[str]) -> list[str]:
    """Return the stable ids of databases; add a sentence to `troubles` about each that cannot be read."""
    names = []
    for alias in databases:
        try:
            with connected(alias, "outbox topics") as connection:
                names.append(read_identity(connection).source)
        except (NotMigrated, TablesLocked, psycopg.Error) as error:
            troubles.append(
                f"The resources for relays of database {alias!r} are not listed, since its id cannot be read: {line_of(error)}"
            )
    return names


def _as_text(listed: Mapping[str, tuple[list[Shown], list[str]]], *, create: bool) -> Iterator[str]:
    shown = [(alias, *resource) for alias, (resources, _) in listed.items() for resource in resources]
    if shown:
        heads = ["broker", "what", "name", "state", "settings"]
        yield table(
            heads,
            [
                [broker, resource.kind, _full_name(resource), state, _settings(resource, state)]
                for broker, resource, state in shown
            ],
        )
    for alias, (resources, troubles) in listed.items():
        if not (resources or troubles):
            yield f"Broker {alias!r}: {conf.broker_class(alias).__name__} does not list the resources that it needs."
        yield from (f"Broker {alias!r}: {trouble}" for trouble in troubles)
    yield from (
        f"{resource.kind.capitalize()} {_full_name(resource)!r}: {resource.trouble}"
        for _, resource, _ in shown
        if resource.trouble
    )
    states = {state for _, _, state in shown}
    if "different" in states:
        yield NEVER_CHANGED
    if "missing" in states and not create:
        yield HOW_TO_CREATE


def _full_name(resource: ServerResource) -> str:
    return f"{resource.name} at {resource.place}" if resource.place else resource.name


def _settings(resource: ServerResource, state: str) -> str:
    if state == "different":
        return "; ".join(resource.differences)
    return ", ".join(f"{name}={value}" for name, value in resource.wanted.items())
