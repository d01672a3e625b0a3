import json

import pytest
from django.core.management import CommandError, call_command

from outbox.management.actor import actor
from outbox.models import MessageState, OperatorAct, State
from tests.factories import BatchFactory, TopicFactory

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def batch():
    return BatchFactory(topic=TopicFactory(name="broken"), size=2, state=State.DEAD, failures=1)


def replay(*arguments):
    """Run the command; return its exit code."""
    try:
        call_command("outbox_replay_unsent", *map(str, arguments))
    except SystemExit as end:
        return end.code
    return 0


def states(batch):
    return [MessageState.objects.get(id=message_id).state for message_id in batch.message_ids]


class TestOutboxRetry:
    def test_sends_messages_again(self, batch, capsys):
        assert replay(batch.message_ids[0]) == 0

        assert states(batch) == ["released", "dead"]
        assert capsys.readouterr().out == "1 message will be sent again.\n"

    def test_writes_down_who_did_it(self, batch):
        replay(batch.message_ids[0])
        replay("--all", "--discard", "--no-input")

        rows = OperatorAct.objects.order_by("id").values_list("act", "message_id", "topic", "acted_by")
        by = actor("outbox_replay_unsent")
        assert list(rows) == [("replayed", batch.message_ids[0], "broken", by), ("discarded", batch.message_ids[1], "broken", by)]

    @pytest.mark.parametrize("which", [["--topic", "broken"], ["--all"]])
    def test_sends_all_again(self, which, batch):
        assert replay(*which) == 0
        assert states(batch) == ["released"] * 2

    def test_lets_messages_rest(self, batch, capsys):
        assert replay("--all", "--discard", "--no-input") == 0

        assert states(batch) == ["discarded"] * 2
        assert capsys.readouterr().out == "2 messages discarded.\n"

    def test_discards_what_it_asked_about_and_not_what_died_since(self, batch, monkeypatch):
        since = []
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda prompt: since.append(BatchFactory(state=State.DEAD)) or "yes")

        assert replay("--all", "--discard") == 0

        assert states(batch) == ["discarded"] * 2
        assert states(since[0]) == ["dead"]

    def test_discards_nothing_unasked_where_there_is_no_terminal(self, batch, capsys):
        with pytest.raises(CommandError, match="--no-input") as refused:
            replay("--topic", "broken", "--discard")

        assert refused.value.returncode == 2
        assert states(batch) == ["dead"] * 2
        asked = capsys.readouterr().err
        assert "            2  broken" in asked
        assert "This cannot be undone" in asked

    def test_says_what_it_did_not_do(self, batch, capsys):
        replay(batch.message_ids[0])
        capsys.readouterr()

        assert replay(*batch.message_ids, "--json") == 1

        assert json.loads(capsys.readouterr().out) == {
            "messages": 1,
            "refused": {str(batch.message_ids[0]): "It is not dead."},
        }

    def test_ends_with_1_when_nothing_is_dead(self, capsys):
        assert replay("--all") == 1
        assert capsys.readouterr().out == "No message is dead.\n"

    def test_knows_the_topics(self, batch):
        with pytest.raises(CommandError, match=r"There is no topic 'brokn' in this database\. Choices are: .*broken") as caught:
            replay("--topic", "brokn")

        assert caught.value.returncode == 2

    @pytest.mark.parametrize("which", [[], ["--all", "--topic", "broken"]])
    def test_wants_to_know_which(self, which):
        with pytest.raises(CommandError, match="Choose one of") as error:
            call_command("outbox_replay_unsent", *which)

        assert error.value.returncode == 2

    def test_refuses_what_is_no_message_id(self):
        with pytest.raises(CommandError, match="invalid message id value: 'x'"):
            call_command("outbox_replay_unsent", "x")
