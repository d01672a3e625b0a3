"""Each mistake of a newcomer is named at the earliest moment, in a sentence that says what to do."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests import rabbitmq_node
from tests.journeys.newcomer.mistakes import CHECK, CHECK_DATABASE, MISTAKES, call, only_rabbitmq, task
from tests.journeys.newcomer.project import SETTINGS, Command, Play, Stage, open_stage

AT_ONCE = 2

CASES = [
    (play, command, mistake, sentence)
    for play in MISTAKES
    for command, mistakes in play.says.items()
    for mistake, sentence in mistakes.items()
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, django_db_setup: None) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("newcomer")) as stage:
        yield stage


@pytest.fixture(scope="module")
def played(stage: Stage, request: pytest.FixtureRequest) -> Iterator[dict[int, Future[list[str]]]]:
    """Play the projects of all tests that were chosen, two at a time."""
    chosen = [item.callspec.params["play"] for item in request.session.items if getattr(item, "cls", None) is TestAMistake]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {id(play): pool.submit(stage.play, play) for play in {id(one): one for one in chosen}.values()}


@pytest.mark.slow
@pytest.mark.timeout(300)  # a test waits for its play, and plays wait for one another
class TestAMistake:
    @pytest.mark.parametrize(("play", "command", "mistake", "sentence"), CASES, ids=[case[2] for case in CASES])
    def test_is_named(self, played, play: Play, command: Command, mistake: str, sentence: str):
        outputs = played[id(play)].result()

        said = dict(zip(play.commands, outputs, strict=True))
        assert sentence in said[command]
        assert all("System check identified no issues" in said[quiet] for quiet in play.quiet), said
        assert may_have_traceback(said[command], command) or "Traceback" not in said[command]


def may_have_traceback(said: str, command: Command) -> bool:
    """Return whether the user's code raised: in a shell, in a handler, or when Django imports it."""
    return command[0] == "shell" or any(f"/shop/{file}.py" in said for file in ("consumers", "orders", "messages", "tasks"))


NEVER_SAID = ["outbox.W", "outbox.E", "embedded", "'default', broker 'default'", "Traceback"]


class TestTheSetUpOfCelerysTasks:
    def test_leads_to_a_relay_and_says_nothing_of_a_broker_that_it_does_not_use(self, stage: Stage):
        commands = [
            ("migrate", "-v1"),
            CHECK_DATABASE,
            task("print('sent', send_receipt.delay_in_transaction(1))"),
            ("outbox_relay", "--once"),
            ("outbox_status",),
            ("outbox_doctor",),
        ]

        said = stage.play(Play({}, quiet=commands, page="celery-tasks.md", database="empty"))

        assert [(one, word) for one in said for word in NEVER_SAID if word in one] == []
        assert "System check identified no issues" in said[1]
        assert said[2].startswith("sent ")
        assert "Celery's broker (CELERY_BROKER_URL): " in said[3]  # nothing listens there


@pytest.mark.rabbitmq
class TestOnRabbitMQ:
    @pytest.mark.parametrize(
        ("options", "edits", "sentence"),
        [
            ({"PASSWORD": "wrong"}, [], "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN."),
            ({"VIRTUAL_HOST": "shop"}, [], "NOT_ALLOWED - vhost shop not found"),
            (
                {},
                [("shop/consumers.py", '@consumer(OrderPlaced, group="points")', "")],
                "No queue takes messages of 'orders': no consumer group has received from it yet, or its queues were "
                'deleted. Start the consumers, or name the groups in OPTIONS["GROUPS"].',
            ),
            ({}, [], "1 sent in 1 batch,"),
        ],
        ids=["password", "virtual host", "no group", "no mistake"],
    )
    def test_a_relay_names_the_mistake(self, stage: Stage, options, edits, sentence):
        node = rabbitmq_node.server()
        lines = only_rabbitmq(str({"NODES": [node.address], **options}))
        commands = [CHECK, call("publish(OrderPlaced(order_id=1))"), ("outbox_relay", "--once"), ("outbox_status",)]

        said = stage.play(Play({}, [(SETTINGS, "", lines), *edits], quiet=commands, database="migrated"))

        assert sentence in said[2]
        assert sentence in said[3] or sentence.startswith("1 sent")
        assert "Traceback" not in "".join(said)
