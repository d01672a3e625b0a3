"""
Two releases of a project side by side on RabbitMQ: what docs/how-to/deploy.md promises, on topics with and without order.

Nothing is passed over, nothing stops, order per key is kept, and `outbox_status` tells the truth.
"""

import json
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from outbox.models import Inbox, Process
from project.servers.rabbitmq import RabbitMQ
from tests.journeys.deploys.given import VARIABLE
from tests.journeys.processes import Processes, send
from tests.journeys.tables import rows, tables
from tests.rabbitmq_node import server
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(180),
    pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server."),
]

TABLE = "CREATE TABLE deploy_effect (id bigserial, release text, consumer_group text, topic text, key text, number int)"

BILLING = "billing"
KEYS = ["a", "b", "c"]
PATIENCE = 30  # seconds

Handler = tuple[str, str, list[str]]  # type, group, tags
Sent = tuple[str, int, str, str]  # type, number, key, tag


@dataclass(frozen=True)
class Release:
    """A project's settings and handlers. `types`: type -> topic; `options`: more OPTIONS of its brokers."""

    name: str
    handlers: list[Handler]
    types: dict[str, str]
    topics: dict[str, dict[str, Any]]
    groups: list[str] = field(default_factory=lambda: [BILLING])
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        brokers = {}
        for alias, host in {"default": "/", "elsewhere": "elsewhere"}.items():
            groups = {name: self.groups for name, one in self.topics.items() if one.get("BROKER", "default") == alias}
            if groups:
                options = {"NODES": [server().address], "GROUPS": groups, "VIRTUAL_HOST": host, **self.options}
                brokers[alias] = {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": options}
        outbox = {"BROKERS": brokers, "TOPICS": self.topics, "CELERY_WAKEUP": False}
        told = {
            "name": self.name,
            "handlers": self.handlers,
            "types": self.types,
            "outbox": outbox,
        }
        return {VARIABLE: json.dumps(told)}


class Project:
    """Starts processes of its releases, publishes, and reads what came of it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        unique = uuid.uuid4().hex[:8]
        self.orders, self.bills = f"orders-{unique}", f"bills-{unique}"
        self.processes = Processes(folder, "tests.journeys.deploys.settings")

    def release(self, name: str, *handlers: Handler, **more: Any) -> Release:
        """Return a release with both types on the topic of orders."""
        types = {"Placed": self.orders, "Cancelled": self.orders}
        return Release(name, list(handlers), **{"types": types, "topics": {self.orders: {"TYPE": self.kind}}, **more})

    def relay(self, release: Release) -> subprocess.Popen[bytes]:
        return self.processes.start("django", "outbox_relay", **release.variables)

    def consume(self, release: Release, group: str = BILLING) -> subprocess.Popen[bytes]:
        """Start a consumer and wait until it lives."""
        before = Process.objects.filter(kind="consumer").count()
        process = self.processes.start("django", "outbox_consume", "--group", group, **release.variables)
        wait_until(lambda: Process.objects.filter(kind="consumer").count() > before, 30)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a process in an orderly way."""
        send(process, signal.SIGTERM)
        process.wait(30)

    def publish(self, release: Release, messages: list[Sent]) -> None:
        publisher = self.processes.start("tests.journeys.deploys.publisher", **release.variables, MESSAGES=json.dumps(messages))
        assert publisher.wait(60) == 0, self.processes.logs()

    def status(self, release: Release) -> dict[str, Any]:
        """Return what `outbox_status` of a release says of the database."""
        asking = self.processes.start("django", "outbox_status", "--json", **release.variables)
        asking.wait(60)
        said = (self.processes.folder / f"--json.{len(self.processes.processes) - 1}.log").read_text()
        return dict(json.loads(said.splitlines()[-1])["databases"][0])

    def waiting(self, release: Release, group: str = BILLING) -> int:
        """Return how many messages wait for a group, by what `outbox_status` says, at the broker or deferred."""
        status = self.status(release)
        of_group = [one for one in status["groups"] if one["consumer_group"] == group]
        deferred = sum(count["waiting"] for one in of_group for count in one["deferred"].values())
        return sum(sum(one["waiting"].values()) for one in of_group) + deferred

    def handled(self, group: str = BILLING) -> list[int]:
        return [number for number, *_ in self._effects(group)]

    def wait_for(self, messages: list[Sent], group: str = BILLING) -> None:
        """Wait until a group has handled messages; each once, and in the order of their keys where the topic keeps it."""
        numbers = sorted(number for _, number, _, _ in messages)
        with suppress(AssertionError):
            wait_until(lambda: len(set(self.handled(group))) >= len(numbers), PATIENCE)
        assert sorted(self.handled(group)) == numbers
        assert not Inbox.objects.filter(delivery_count=0).exists(), "passed over"
        if self.kind == "fifo":
            of_key: dict[tuple[str, str], list[int]] = {}
            for number, topic, key in self._effects(group):
                of_key.setdefault((topic, key), []).append(number)
            assert all(found == sorted(found) for found in of_key.values()), of_key

    def _effects(self, group: str) -> list[tuple[int, str, str]]:
        return rows("SELECT number, topic, key FROM deploy_effect WHERE consumer_group = %s ORDER BY id", [group])


@pytest.fixture(params=["normal", "fifo"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    found = Project(tmp_path, request.param)
    with tables(TABLE), closing(found.processes):
        yield found
        print(found.processes.logs())  # noqa: T201  (pytest shows it where the test failed)


def mixed(count: int, start: int = 0, tags: tuple[str, ...] = ("",)) -> list[Sent]:
    """Return messages of both types, whose keys and tags alternate."""
    numbers = range(start, start + count)
    return [(("Placed", "Cancelled")[n % 2], n, KEYS[n % len(KEYS)], tags[n // 2 % len(tags)]) for n in numbers]


class TestATypeThatOneReleaseHandles:
    @pytest.mark.parametrize("first", ["fewer", "more"])
    def test_reaches_it_whichever_release_began_to_receive(self, project, first):
        fewer = project.release("fewer", ("Placed", BILLING, []))
        more = project.release("more", ("Placed", BILLING, []), ("Cancelled", BILLING, []))
        releases = [fewer, more] if first == "fewer" else [more, fewer]
        for release in releases:
            project.consume(release)
        project.relay(more)

        messages = mixed(60)
        project.publish(more, messages)

        project.wait_for(messages)
        wait_until(lambda: project.waiting(more) == 0)

    def test_reaches_it_though_hundreds_wait_before_what_the_other_handles(self, project):
        fewer = project.release("fewer", ("Placed", BILLING, []))
        more = project.release("more", ("Placed", BILLING, []), ("Cancelled", BILLING, []))
        project.consume(fewer)
        project.relay(more)
        project.consume(more)

        messages: list[Sent] = [("Cancelled", n, KEYS[n % 3], "") for n in range(300)]
        messages += [("Placed", n, KEYS[n % 3], "") for n in range(300, 310)]
        project.publish(more, messages)

        project.wait_for(messages)

    def test_is_counted_as_waiting_when_that_release_was_killed_and_handled_when_it_is_back(self, project):
        fewer = project.release("fewer", ("Placed", BILLING, []))
        more = project.release("more", ("Placed", BILLING, []), ("Cancelled", BILLING, []))
        project.consume(fewer)
        killed = project.consume(more)
        project.relay(more)
        send(killed, signal.SIGKILL)

        messages = [("Cancelled", n, KEYS[n % 3], "") for n in range(6)]
        project.publish(more, messages)

        wait_until(lambda: project.waiting(more) == 6, PATIENCE)
        assert project.handled() == []
        project.consume(more)
        project.wait_for(messages)


class TestATag:
    @pytest.mark.parametrize("tags", [(["eu"], ["eu", "us"]), (["eu"], ["us"])], ids=["one more", "another"])
    def test_that_one_release_handles_reaches_it(self, project, tags):
        old, new = (
            project.release(name, ("Placed", BILLING, chosen), ("Cancelled", BILLING, chosen))
            for name, chosen in zip(("old", "new"), tags, strict=True)
        )
        project.consume(old)
        project.consume(new)
        project.relay(new)

        messages = mixed(24, tags=("eu", "us"))
        project.publish(new, messages)

        project.wait_for(messages)
        wait_until(lambda: project.waiting(new) == 0)


class TestAGroupUnderAnotherName:
    def test_has_all_that_is_sent_once_its_queue_is_there_and_so_has_the_old_one(self, project):
        old = project.release("old", ("Placed", BILLING, []), ("Cancelled", BILLING, []))
        new = project.release("new", ("Placed", "bills", []), ("Cancelled", "bills", []), groups=["bills"])
        project.relay(old)
        project.consume(old)
        project.publish(old, mixed(10))
        project.wait_for(mixed(10))

        project.consume(new, "bills")
        project.relay(new)
        project.publish(new, mixed(20, start=10))

        project.wait_for(mixed(30))
        project.wait_for(mixed(20, start=10), "bills")

    def test_leaves_what_the_old_one_had_not_handled_with_the_old_name_and_says_so(self, project):
        old = project.release("old", ("Placed", BILLING, []), ("Cancelled", BILLING, []))
        new = project.release("new", ("Placed", "bills", []), ("Cancelled", "bills", []), groups=["bills"])
        both = replace(old, handlers=[*old.handlers, *new.handlers], groups=[BILLING, "bills"])
        project.relay(both)
        project.consume(new, "bills")

        project.publish(old, mixed(10))

        project.wait_for(mixed(10), "bills")
        wait_until(lambda: project.waiting(both) == 10, PATIENCE)
        project.consume(old)
        project.wait_for(mixed(10))


class TestATypeThatIsMovedToAnotherTopic:
    def test_is_handled_on_both(self, project):
        topics = {name: {"TYPE": project.kind} for name in (project.orders, project.bills)}
        handlers = [("Placed", BILLING, []), ("Cancelled", BILLING, [])]
        old = project.release("old", *handlers, topics=topics)
        new = replace(old, name="new", types={"Placed": project.orders, "Cancelled": project.bills})
        project.consume(old)
        project.relay(old)
        project.publish(old, mixed(10))
        project.wait_for(mixed(10))

        project.consume(new)
        project.publish(new, mixed(10, start=10))
        project.publish(old, mixed(10, start=20))

        wait_until(lambda: len(set(project.handled())) >= 30, PATIENCE)
        assert sorted(project.handled()) == list(range(30))
        assert not Inbox.objects.filter(delivery_count=0).exists()

    def test_leaves_what_waits_on_the_old_topic_in_sight(self, project):
        topics = {name: {"TYPE": project.kind} for name in (project.orders, project.bills)}
        old = project.release("old", ("Cancelled", BILLING, []), topics=topics)
        new = replace(old, name="new", types={"Placed": project.bills, "Cancelled": project.bills})
        project.relay(old)
        project.publish(old, mixed(10))

        project.consume(new)
        project.publish(new, mixed(10, start=10))

        wait_until(lambda: sorted(project.handled()) == [11, 13, 15, 17, 19], PATIENCE)
        said = project.status(new)
        assert [one["waiting"].get(project.orders) for one in said["groups"] if one["consumer_group"] == BILLING] == [10]


class TestATopicThatIsMovedToAnotherBroker:
    @pytest.fixture(autouse=True)
    def _elsewhere(self) -> None:
        node = server()
        if "elsewhere" not in node.control("list_vhosts", "--quiet"):
            node.control("add_vhost", "elsewhere")
            node.control("set_permissions", "-p", "elsewhere", "guest", ".*", ".*", ".*")

    def test_is_handled_at_both_while_both_releases_run(self, project):
        handlers = [("Placed", BILLING, []), ("Cancelled", BILLING, [])]
        keeps = {project.bills: {"TYPE": project.kind}}
        both = {**keeps, "far": {"TYPE": project.kind, "BROKER": "elsewhere"}}
        old = project.release("old", *handlers, topics={project.orders: {"TYPE": project.kind}, **both})
        moved = {project.orders: {"TYPE": project.kind, "BROKER": "elsewhere"}, **both}
        new = replace(old, name="new", topics=moved)
        project.consume(old)
        project.relay(old)
        project.publish(old, mixed(10))
        project.wait_for(mixed(10))

        project.consume(new)
        project.relay(new)
        project.publish(new, mixed(10, start=10))
        project.publish(old, mixed(10, start=20))

        wait_until(lambda: len(set(project.handled())) >= 30, PATIENCE)
        assert sorted(project.handled()) == list(range(30))
        assert not Inbox.objects.filter(delivery_count=0).exists()


class TestSettingsOfAQueue:
    def test_that_are_changed_leave_it_and_the_groups_other_topics_read_and_are_named(self, project):
        topics = {name: {"TYPE": project.kind} for name in (project.orders, project.bills)}
        types = {"Placed": project.orders, "Cancelled": project.bills}
        old = project.release("old", ("Placed", BILLING, []), ("Cancelled", BILLING, []), topics=topics, types=types)
        shorter = {**topics, project.orders: {"TYPE": project.kind, "RETENTION": "P3D"}}
        new = replace(old, name="new", topics=shorter)
        project.relay(old)
        project.end(project.consume(old))
        project.publish(old, mixed(10))

        project.consume(new)

        project.wait_for(mixed(10))
        wait_until(lambda: "x-message-ttl" in said(project.status(new)))
        assert project.orders in said(project.status(new))
        assert project.bills not in said(project.status(new))

    def test_that_are_changed_for_all_topics_leave_all_read(self, project):
        handlers = [("Placed", BILLING, []), ("Cancelled", BILLING, [])]
        old = project.release("old", *handlers)
        new = project.release("new", *handlers, options={"MAX_LENGTH": 100_000})
        project.relay(old)
        project.end(project.consume(old))
        project.publish(old, mixed(10))

        project.consume(new)

        project.wait_for(mixed(10))
        wait_until(lambda: "x-max-length" in said(project.status(new)))

    def test_that_are_changed_hold_back_what_the_new_release_sends_and_say_so(self, project):
        """A relay that declares the queue as it is not would be wrong about the promise; an operator has to decide."""
        topics = {name: {"TYPE": project.kind} for name in (project.orders, project.bills)}
        types = {"Placed": project.orders, "Cancelled": project.bills}
        old = project.release("old", ("Placed", BILLING, []), ("Cancelled", BILLING, []), topics=topics, types=types)
        new = replace(old, name="new", topics={**topics, project.orders: {"TYPE": project.kind, "RETENTION": "P3D"}})
        first = project.relay(old)
        project.consume(old)
        project.publish(old, mixed(4))
        project.wait_for(mixed(4))
        project.end(first)

        relay = project.relay(new)
        project.publish(new, mixed(10, start=4))

        wait_until(lambda: set(range(5, 14, 2)) <= set(project.handled()), PATIENCE)  # the other topic is sent
        wait_until(lambda: "x-message-ttl" in said(project.status(new)), PATIENCE)
        project.end(relay)
        project.relay(old)
        project.wait_for(mixed(14))


def said(status: dict[str, Any]) -> str:
    """Return what needs attention, as text."""
    return json.dumps(status["findings"])
