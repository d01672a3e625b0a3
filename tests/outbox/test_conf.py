from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from outbox import conf
from outbox.brokers.capabilities import HalfMessages
from outbox.brokers.memory import MemoryBroker
from outbox.errors import ConfigurationError, OutboxError, UnknownTopic
from outbox.message import TopicSpec, TopicType

MEMORY = {"BACKEND": "outbox.brokers.memory.MemoryBroker"}


class OnePhaseBroker(MemoryBroker):
    lacks = (HalfMessages,)


class TestSettings:
    def test_are_whole_without_any(self, settings):
        settings.OUTBOX = {}

        found = conf.settings()

        assert found.brokers["default"].backend == "outbox.embedded.EmbeddedBroker"
        assert found.relay.batch_size == 500
        assert found.celery_wakeup

    def test_are_read_again_when_they_change(self, settings):
        settings.OUTBOX = {"BROKERS": {"default": MEMORY}, "TOPICS": {"orders": {}}}
        assert conf.topic_settings("orders").type is TopicType.TRANSACTION
        settings.OUTBOX = {"BROKERS": {"default": MEMORY}, "TOPICS": {"orders": {"TYPE": "fifo"}}}

        assert conf.topic_settings("orders").type is TopicType.FIFO

    def test_have_what_is_made_of_them_made_again_when_they_change(self, settings):
        @conf.cached
        def tasks_of(name):
            return object()

        first = tasks_of("orders")
        settings.DEBUG = True
        is_kept = tasks_of("orders") is first
        settings.OUTBOX = {}

        assert is_kept
        assert tasks_of("orders") is not first

    def test_cannot_be_changed(self):
        with pytest.raises(AttributeError):
            conf.settings().celery_wakeup = False

    @pytest.mark.parametrize(
        ("outbox", "text"),
        [
            ({"TOPIKS": {}}, r"^OUTBOX has an unknown setting 'TOPIKS'\. Did you mean TOPICS\?$"),
            ({"RELAY": {"LEESE": 1}}, r"^OUTBOX\[\"RELAY\"\] has an unknown setting 'LEESE'\. Did you mean LEASE\?$"),
            ({"relay": {}}, r"unknown setting 'relay'\. Did you mean RELAY\?$"),
            ({"LEASE": 1}, r"^OUTBOX has an unknown setting 'LEASE'\. It belongs in OUTBOX\[\"RELAY\"\]\.$"),
            (
                {"RELAY": {"TYPE": "fifo"}},
                r"\[\"RELAY\"\] has an unknown setting 'TYPE'\. It belongs in OUTBOX\[\"TOPICS\"\]\[\.\.\.\]\.$",
            ),
            (
                {"TOPICS": {"a": {"XYZ": 1}}},
                r"\[\"a\"\] has an unknown setting 'XYZ'\. Choices are: BROKER, TYPE, QUEUES, RETENTION\.$",
            ),
            (
                {"RELAY": {"LEASE": "soon"}},
                r'^OUTBOX\["RELAY"\]\["LEASE"\] has a wrong value: Invalid ISO8601 duration\. Write timedelta',
            ),
            (
                {"TOPICS": {"a": {}, "b": {"TYPE": "queue"}}},
                r"\[\"TOPICS\"\]\[\"b\"\]\[\"TYPE\"\] has .* 'queue'\. Choices are: 'normal', 'transaction', 'fifo', 'delay'\.$",
            ),
            (
                {"BROKERS": {"main": {}, "spare": {"OPTION": {}}}},
                r"\[\"spare\"\] has an unknown setting 'OPTION'\. Did you mean OPTIONS\?",
            ),
            ({"RELAY": {"BATCH_SIZE": 2001}}, r'\["RELAY"\]\["BATCH_SIZE"\] has a wrong value: Expected `int` <= 2000\.$'),
            ({"RELAY": {"LANES": 0}}, r'\["RELAY"\]\["LANES"\] has a wrong value: Expected `int` >= 1\.$'),
            ({"TOPICS": {"a": {"QUEUES": 0}}}, r'\["TOPICS"\]\["a"\]\["QUEUES"\] has a wrong value: Expected `int` >= 1\.$'),
            (
                {"TOPICS": ["a"]},
                r'^OUTBOX\["TOPICS"\] has .* a dict, got a list\. Write \{"NAME": \{\.\.\.\}\}, an entry for each',
            ),
            (
                {"CHECK_BACK": {"SECRETS": ["a", 7]}},
                r'\["CHECK_BACK"\]\["SECRETS"\]\[1\] has a wrong value: Expected `str`, got `int`\.$',
            ),
            (
                None,
                r"^OUTBOX has a wrong value: Expected a dict, got None\. Write \{\} for its defaults, or set: PROJECT, BROKERS, ",
            ),
            ([], r"^OUTBOX has a wrong value: Expected a dict, got a list\."),
            ({"RELAY": {"LEASE": 30}}, r"Expected a duration, got `int`\. Write timedelta\(seconds=\.\.\.\)"),
            ({"RELAY": {"LEASE": timedelta(0)}}, r'OUTBOX\["RELAY"\]\["LEASE"\] is 0:00:00; it must be greater than zero'),
            ({"RELAY": {"SWEEP_AGE": timedelta(-1)}}, r'\["RELAY"\]\["SWEEP_AGE"\] is -1 day, 0:00:00; it must be'),
            ({"RETENTION": timedelta(0)}, r'OUTBOX\["RETENTION"\] is 0:00:00'),
            ({"TOPICS": {"a": {"RETENTION": timedelta(0)}}}, r'OUTBOX\["TOPICS"\]\["a"\]\["RETENTION"\] is 0:00:00'),
            (
                {"TOPICS": {"topic-5841": {}, "topic-22932": {}}},
                r"'topic-5841' and 'topic-22932' in .* have the same id.*\. Rename",
            ),
            (
                {"TOPICS": {"a": {"BROKER": "b"}}},
                r'\["a"\] names the broker \'b\', which is not in .* \(default\)\. Add the broker',
            ),
        ],
    )
    def test_name_what_is_wrong(self, settings, outbox, text):
        settings.OUTBOX = outbox

        with pytest.raises(ConfigurationError, match=text) as caught:
            conf.settings()

        assert isinstance(caught.value, OutboxError)
        assert isinstance(caught.value, ImproperlyConfigured)

    def test_let_a_batch_be_ended_again_at_once(self, settings):
        settings.OUTBOX = {"RELAY": {"SWEEP_AGE": timedelta(0)}}

        assert conf.settings().relay.sweep_age == timedelta(0)


class TestATopic:
    @pytest.mark.parametrize(
        ("backend", "kind"),
        [("outbox.brokers.memory.MemoryBroker", "transaction"), (f"{__name__}.OnePhaseBroker", "normal")],
    )
    def test_is_by_default_as_its_broker_can(self, settings, backend, kind):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": backend}}, "TOPICS": {"orders": {}}}

        assert conf.topic_settings("orders").type == kind

    def test_is_not_guessed(self, settings):
        settings.OUTBOX = {"BROKERS": {"default": MEMORY}, "TOPICS": {"orders": {}}}

        with pytest.raises(UnknownTopic, match=r"Topic 'order' is not in OUTBOX\[\"TOPICS\"\]\. Did you mean 'orders'\?"):
            conf.topic_settings("order")
        with pytest.raises(UnknownTopic, match=r"Add it: OUTBOX\[\"TOPICS\"\]\[\"bills\"\] = \{\}\."):
            conf.topic_settings("bills")

    def test_is_given_to_its_broker(self, settings):
        settings.OUTBOX = {
            "BROKERS": {"default": MEMORY, "spare": MEMORY},
            "TOPICS": {"b": {}, "a": {"TYPE": "fifo", "RETENTION": timedelta(hours=1)}, "c": {"BROKER": "spare"}},
            "RETENTION": timedelta(days=9),
        }

        assert conf.topics_of("default") == [
            TopicSpec("a", TopicType.FIFO, 4, timedelta(hours=1), timedelta(days=9)),
            TopicSpec("b", TopicType.TRANSACTION, 4, timedelta(days=7), timedelta(days=9)),
        ]
        assert [topic.name for topic in conf.topics_of("spare")] == ["c"]

    def test_is_given_to_its_broker_beside_one_that_cannot_be_imported(self, settings):
        settings.OUTBOX = {
            "BROKERS": {"default": MEMORY, "gone": {"BACKEND": "gone.Broker"}},
            "TOPICS": {"a": {}, "b": {"BROKER": "gone"}},
        }

        assert [topic.name for topic in conf.topics_of("default")] == ["a"]

    def test_is_normal_for_a_broker_without_half_messages(self, settings):
        default = {"BACKEND": f"{__name__}.OnePhaseBroker"}
        settings.OUTBOX = {"BROKERS": {"default": default}, "TOPICS": {"orders": {"TYPE": "transaction"}}}

        assert [topic.type for topic in conf.topics_of("default")] == [TopicType.NORMAL]


class TestABroker:
    def test_is_made_with_its_topics(self, settings):
        settings.OUTBOX = {"BROKERS": {"default": MEMORY}, "TOPICS": {"orders": {}}}

        broker = conf.make_broker("default")

        assert (type(broker), broker.alias, list(broker.topics)) == (MemoryBroker, "default", ["orders"])

    @pytest.mark.parametrize(
        ("alias", "text"),
        [
            ("nowhere", r"Broker 'nowhere' is not in OUTBOX\[\"BROKERS\"\] \(dated, default, gone\)"),
            ("gone", r"'gone\.Broker' cannot be imported: No module named 'gone'\. Correct the path, or install gone\."),
            ("dated", r"'datetime\.datetime' is not a Broker class"),
        ],
    )
    def test_is_found_or_the_text_says_why_not(self, settings, alias, text):
        settings.OUTBOX = {
            "BROKERS": {"default": MEMORY, "gone": {"BACKEND": "gone.Broker"}, "dated": {"BACKEND": "datetime.datetime"}}
        }

        with pytest.raises(ConfigurationError, match=text):
            conf.broker_class(alias)
