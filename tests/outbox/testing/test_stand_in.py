import pytest
from django.test import override_settings

from outbox import atomic, conf, publish_raw
from outbox.brokers.base import EndSemantics, Outgoing, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.brokers.memory import MemoryBroker
from outbox.brokers.memory.store import store
from outbox.errors import ConfigurationError
from outbox.message import TopicType
from outbox.testing import Outbox

EMBEDDED = "outbox.embedded.EmbeddedBroker"
NOT_INSTALLED = "somebodys.brokers.Elsewhere"
PLAIN = Outgoing("1", "plain", b"{}")


class OnePhase(MemoryBroker):
    lacks = (HalfMessages,)


class Stateless(MemoryBroker):
    end_semantics = EndSemantics.STATELESS


def outbox_of(backend, **topics):
    return {
        "BROKERS": {"default": {"BACKEND": backend, "OPTIONS": {}}},
        "TOPICS": {name: {"TYPE": kind} if kind else {} for name, kind in topics.items()},
    }


class TestTheStandIn:
    @pytest.mark.parametrize("backend", [EMBEDDED, "outbox.brokers.rocketmq.RocketMQBroker", NOT_INSTALLED])
    def test_takes_the_place_of_any_broker(self, settings, backend):
        settings.OUTBOX = outbox_of(backend, orders=None)

        with Outbox() as outbox:
            assert isinstance(conf.make_broker("default"), MemoryBroker)
            assert outbox.broker.topics["orders"].type is TopicType.TRANSACTION

    def test_leaves_when_the_test_ends(self, settings):
        settings.OUTBOX = outbox_of(EMBEDDED, plain="normal")

        with Outbox() as outbox:
            name = conf.settings().brokers["default"].options["NAME"]
            outbox.broker.send([PLAIN])
            assert store(name).copies != {}

        assert conf.settings().brokers["default"].backend == EMBEDDED
        assert store(name).copies == {}

    def test_lets_topics_travel_as_they_do_with_their_broker(self, settings):
        settings.OUTBOX = outbox_of(f"{__name__}.OnePhase", plain=None, asked="transaction", keyed="fifo", later="delay")

        with Outbox() as outbox:
            kinds = {name: spec.type for name, spec in outbox.broker.topics.items()}

        assert kinds == {"plain": "normal", "asked": "normal", "keyed": "fifo", "later": "delay"}

    def test_ends_half_messages_as_their_broker_does(self, settings):
        settings.OUTBOX = outbox_of(f"{__name__}.Stateless")

        with Outbox() as outbox:
            assert outbox.broker.end_semantics is EndSemantics.STATELESS

    def test_shares_nothing_with_the_next_test(self, settings):
        settings.OUTBOX = outbox_of(EMBEDDED, plain="normal")

        with Outbox() as outbox:
            outbox.broker.fail("send", "unsure", times=None)
        with Outbox() as another:
            (result,) = another.broker.send([PLAIN])

        assert result.status is SendStatus.ACCEPTED

    def test_sends_no_wakeups(self, settings):
        settings.OUTBOX = {**outbox_of(EMBEDDED), "CELERY_WAKEUP": True}

        with Outbox():
            assert not conf.settings().celery_wakeup

    def test_stays_when_the_test_changes_settings(self, settings):
        settings.OUTBOX = outbox_of(EMBEDDED, plain="normal", old="normal")
        with Outbox() as outbox:
            outbox.broker.send([PLAIN])

            settings.OUTBOX = outbox_of(EMBEDDED, plain="normal", news="normal")

            assert len(outbox.broker.visible("plain")) == 1
            assert set(outbox.broker.topics) == {"plain", "news"}
            assert not conf.settings().celery_wakeup

    @pytest.mark.parametrize("is_settings_first", [True, False])
    def test_leaves_no_trace_of_a_test_that_changed_settings(self, is_settings_first):
        before = conf.settings()
        changes = override_settings(OUTBOX=outbox_of(EMBEDDED, news="normal"))
        kit = Outbox()
        kit.__enter__()
        changes.enable()

        for leave in [changes.disable, kit.__exit__] if is_settings_first else [kit.__exit__, changes.disable]:
            leave()

        assert conf.settings() == before

    def test_finds_wrong_settings(self, settings):
        settings.OUTBOX = {"TOPIC": {}}

        with pytest.raises(ConfigurationError, match="unknown setting 'TOPIC'"), Outbox():
            pass

    def test_takes_messages_of_topics_that_settings_have_changed(self, own_topics, settings, outbox):
        settings.OUTBOX = outbox_of(f"{__name__}.OnePhase", orders="transaction")  # its row says so, too; it is sent one-phase
        with atomic():
            publish_raw("orders", {})

        outbox.run_until_idle()

        assert len(outbox.broker.visible("orders")) == 1


class TestTheBroker:
    def test_is_the_only_one(self, settings):
        settings.OUTBOX = {"BROKERS": {"rocket": {}}}

        with Outbox() as outbox:
            assert outbox.broker.alias == "rocket"

    def test_is_the_one_called_default(self, settings):
        settings.OUTBOX = {"BROKERS": {"rocket": {}, "default": {}}}

        with Outbox() as outbox:
            assert outbox.broker.alias == "default"
            assert outbox.brokers["rocket"].alias == "rocket"

    def test_must_be_named_among_several(self, settings):
        settings.OUTBOX = {"BROKERS": {"rocket": {}, "kafka": {}}}

        with Outbox() as outbox, pytest.raises(AssertionError, match=r"outbox.brokers\[...\]; choices are: rocket, kafka"):
            outbox.broker  # noqa: B018
