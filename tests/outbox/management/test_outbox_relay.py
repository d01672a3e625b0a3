"""`manage.py outbox_relay` as a real process on the embedded broker: killed, stopped, cut off, side by side."""

import json
import logging
import signal
import time
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from outbox.embedded.models import EmbeddedHalf, EmbeddedMessage, EmbeddedTopic, HalfState
from outbox.ids import topic_number
from outbox.models import Batch, Deferred, MessageState, Process, State, Ticket
from outbox.testing.factories import DeferredFactory, InboxFactory
from tests.outbox.management.conftest import TOPIC
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

logger = logging.getLogger(__name__)

RELAY_BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'outbox %%' AND datname = current_database()"


def are_sent(ids):
    return MessageState.objects.filter(id__in=ids, state="sent").count() == len(ids)


def visible():
    """Count the broker's messages; and second sends of one that it had already."""
    return EmbeddedMessage.objects.count(), EmbeddedHalf.objects.filter(state=HalfState.COMMITTED).count()


def is_idle(own):
    return own.execute("SELECT EXISTS (SELECT FROM outbox_wakeup)").fetchone()[0]


class TestOutboxRelay:
    def test_relays_what_is_published_while_it_stays(self, start, publish, own):
        start()
        wait_until(lambda: is_idle(own))

        ids = publish(3)

        wait_until(lambda: are_sent(ids))
        assert visible() == (3, 0)

    def test_tidies_deferred_messages(self, start):
        row = DeferredFactory(dead=True)
        InboxFactory(message_id=row.message_id)

        start()

        wait_until(lambda: not Deferred.objects.exists())

    def test_finds_everything_without_being_notified(self, start, publish, own):
        own.execute("CREATE RULE no_wakeup AS ON INSERT TO outbox_wakeup DO INSTEAD NOTHING")
        try:
            start()
            wait_until(lambda: Process.objects.filter(kind="relay").exists())

            ids = publish(3)

            wait_until(lambda: are_sent(ids))
        finally:
            own.execute("DROP RULE no_wakeup ON outbox_wakeup")

    def test_ends_on_sigterm_with_nothing_left_claimed(self, start, publish, own):
        relay = start()
        wait_until(lambda: is_idle(own))
        publish(300)

        relay.send_signal(signal.SIGTERM)
        output, errors = relay.communicate(timeout=60)

        assert (relay.returncode, errors) == (0, "")
        assert json.loads(output)["relays"][0]["broker"] == "default"
        assert not Batch.objects.filter(state__in=[State.CLAIMED, State.PREPARED]).exists()
        assert not Process.objects.exists()
        assert not is_idle(own)

    def test_is_replaced_within_seconds_when_it_is_killed(self, start, publish, own):
        start()
        wait_until(lambda: is_idle(own))
        doomed = start(failpoints="relay.after_half=kill")
        ids = []
        while doomed.poll() is None:
            ids += publish(1)
        killed_at = time.monotonic()
        assert doomed.returncode == -signal.SIGKILL

        wait_until(lambda: are_sent(ids))

        logger.info("takeover after SIGKILL: %.2f s", time.monotonic() - killed_at)
        assert Batch.objects.filter(attempt=2, state=State.SENT).exists()
        assert visible() == (len(ids), 0)

    def test_goes_on_when_its_connections_are_cut(self, start, publish, own):
        relay = start()
        wait_until(lambda: is_idle(own))
        for number in range(1, 4):
            publish(100)
            wait_until(lambda: own.execute(f"SELECT pg_terminate_backend(pid) FROM ({RELAY_BACKENDS}) b").fetchall())
            wait_until(lambda sent=100 * number: MessageState.objects.filter(state="sent").count() == sent, seconds=20)

        assert relay.poll() is None
        assert visible() == (300, 0)

    def test_shares_the_work_with_another(self, start, publish, own):
        publish(2000)
        first, second = start(), start()

        wait_until(lambda: not Ticket.objects.exists() and not Batch.objects.exclude(state=State.SENT).exists(), seconds=30)

        for relay in (first, second):
            relay.send_signal(signal.SIGTERM)
            relay.communicate(timeout=60)
        assert visible() == (2000, 0)
        assert not Batch.objects.filter(attempt__gt=1).exists()

    @pytest.mark.parametrize(("arguments", "says"), [((), True), (("--json",), False), (("--verbosity=0",), False)])
    def test_says_at_first_what_it_serves(self, arguments, says):
        output = StringIO()

        call_command("outbox_relay", "--once", "--database", "default", *arguments, stdout=output)

        assert output.getvalue().startswith("Relaying database 'default', broker 'default'.\n") is says

    def test_relays_what_waits_and_ends(self, publish, capsys):
        ids = publish(2)

        call_command("outbox_relay", "--once", "--database", "default", "--json")

        assert json.loads(capsys.readouterr().out)["relays"][0]["sent"] == 2
        assert are_sent(ids)
        assert not Process.objects.exists()

    def test_exits_with_1_when_once_leaves_messages_unsent(self, publish, capsys):
        ids = publish(2)
        EmbeddedTopic.objects.create(id=topic_number(TOPIC), name=TOPIC, type="fifo", queues=1)  # not as in settings

        with pytest.raises(SystemExit) as ended:
            call_command("outbox_relay", "--once", "--database", "default")

        assert ended.value.code == 1
        assert "0 sent in 1 batch, 2 to be retried or dead" in capsys.readouterr().out
        assert not are_sent(ids)

    def test_says_what_it_did(self, publish, capsys):
        publish(2)

        call_command("outbox_relay", "--once", "--database", "default")

        assert capsys.readouterr().out == (
            "Relaying database 'default', broker 'default'.\n"
            "database 'default', broker 'default': 2 sent in 1 batch, 0 to be retried or dead\n"
        )

    def test_refuses_an_unknown_broker(self):
        with pytest.raises(CommandError, match=r"There is no broker 'nix' in settings\. Choices are: default"):
            call_command("outbox_relay", "--broker", "nix")

    def test_refuses_to_run_where_there_are_no_topics(self, settings):
        settings.OUTBOX = {}

        with pytest.raises(CommandError, match="No relay is needed"):
            call_command("outbox_relay")
