import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import connections

from outbox.models import CheckBack, State
from tests.commands import refused, run
from tests.factories import BatchFactory, DelayedFactory, TicketFactory, TopicFactory, stored

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def topic():
    return TopicFactory(name="orders-of-the-test", type="transaction")


def ask(message_id):
    """Return the printed JSON and the exit code."""
    printed, code = run("outbox_check_back", message_id, "--json")
    return json.loads(printed), code


class TestOutboxCheckBack:
    def test_says_what_a_broker_would_hear(self, topic):
        batch = BatchFactory(topic=topic, size=2, state=State.SENT, half_ids=["h1", "h2"])

        said, code = ask(batch.message_ids[1])

        assert code == 0
        assert (said["answer"], said["half_id"], said["state"], said["about"]) == ("COMMIT", "h2", "sent", "none")
        assert said["token"].endswith(f":{batch.id}:1:2")
        assert CheckBack.objects.get().asked_by == "command"

    def test_says_rollback_where_a_broker_would_hear_it(self, topic):
        batch = BatchFactory(topic=topic, state=State.RELEASED)

        said, code = ask(batch.message_ids[0])

        assert (said["answer"], code) == ("ROLLBACK", 0)

    def test_looks_at_the_batch_that_a_message_was_split_into(self, topic):
        first = BatchFactory(topic=topic, size=2, state=State.SENT, half_ids=["h1", None], split=[2])
        second = BatchFactory(topic=topic, message_ids=first.message_ids[1:], state=State.SENT, half_ids=["h3"])

        said, _ = ask(first.message_ids[1])

        assert (said["answer"], said["half_id"]) == ("COMMIT", "h3")
        assert said["token"].endswith(f":{second.id}:1:1")

    def test_names_a_half_that_went_first_as_its_broker_does(self, topic):
        batch = BatchFactory(topic=topic, state=State.PREPARED, half_ids=["h"], lane=None, first_seq=None)

        said, _ = ask(batch.message_ids[0])

        assert (said["answer"], said["half_id"]) == ("COMMIT", "h")
        assert said["token"].endswith(":0:1:1")

    def test_names_the_batch_of_one_that_went_first_and_is_sent_again(self, topic):
        batch = BatchFactory(topic=topic, state=State.SENT, attempt=2, half_ids=["h"], lane=None, first_seq=None)

        said, _ = ask(batch.message_ids[0])

        assert said["answer"] == "COMMIT"
        assert said["token"].endswith(f":{batch.id}:2:1")

    def test_ends_with_1_where_the_answer_is_unknown(self, topic):
        batch = BatchFactory(topic=topic, state=State.CLAIMED)

        said, code = ask(batch.message_ids[0])

        assert (said["answer"], code) == ("UNKNOWN", 1)

    def test_takes_a_batch_back_as_a_broker_would(self, topic):
        batch = BatchFactory(topic=topic, lease_until=datetime.now(UTC) - timedelta(seconds=1))

        said, code = ask(batch.message_ids[0])

        assert (said["answer"], code) == ("ROLLBACK", 0)
        assert stored(batch).state == State.RELEASED

    @pytest.mark.parametrize(("factory", "state"), [(TicketFactory, "waiting"), (DelayedFactory, "delayed")])
    def test_says_that_a_message_waits(self, topic, factory, state):
        message_id = factory(topic=topic).message_id

        said, code = ask(message_id)

        assert (said["answer"], said["state"], said["token"], code) == ("UNKNOWN", state, None, 1)
        assert f"it is {state}" in said["reason"]

    @pytest.mark.parametrize("kind", ["normal", "transaction"])
    def test_says_that_a_message_was_sent_in_one_phase(self, kind):
        batch = BatchFactory(topic=TopicFactory(type=kind), state=State.SENT)

        said, code = ask(batch.message_ids[0])

        assert (said["answer"], said["state"], said["token"], code) == ("UNKNOWN", "sent", None, 1)

    def test_prints_words_for_people(self, topic):
        batch = BatchFactory(topic=topic, state=State.SENT, half_ids=["h"])

        printed, _ = run("outbox_check_back", batch.message_ids[0])

        lines = printed.splitlines()
        assert lines[0] == f"COMMIT: Batch {batch.id} was decided with this half message."
        assert lines[1] == f"message {batch.message_ids[0]} of topic orders-of-the-test, sent"
        assert lines[2].startswith("half message h, token urn:uuid:")
        assert lines[3] == "the row it is about: none"

    @pytest.mark.parametrize("message_id", ["018f6f3e-7f00-7000-8000-000000004711", "4711"])
    def test_ends_with_2_where_there_is_no_such_message(self, message_id):
        with refused(message_id):
            ask(message_id)

    def test_says_in_one_line_that_a_database_is_away(self, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setitem(connections["default"].settings_dict, "PORT", 1)
            with refused("'default' cannot be reached"):
                ask(uuid4())

    def test_hands_its_exit_code_to_the_shell(self):
        command = [sys.executable, "manage.py", "outbox_check_back", "4711"]

        outcome = subprocess.run(command, capture_output=True, text=True)

        assert outcome.returncode == 2
        assert outcome.stderr == "CommandError: '4711' is not a message id, which is a UUID.\n"
