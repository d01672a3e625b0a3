"""Sessions and questions at a stub: what a real proxy does only on a bad day."""

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest

from outbox.brokers.base import Broker, Outgoing
from outbox.brokers.rocketmq import session
from outbox.brokers.rocketmq.codec import to_proto
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import StoredMessage
from outbox.brokers.rocketmq.stubs import Code, definition
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Resolution, TopicType
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.outbox.brokers.rocketmq.stub import Stub, Wire
from tests.waiting import wait_until

OpenAt = Callable[..., Broker]
RESOLUTIONS = definition.TransactionResolution


def question(half_id: str = "m.1", *, asked: int = 1, ahead: float = 0.0) -> Any:
    """Return a half message as the server shows it when it asks."""
    message = Outgoing("m", "transaction", b"{}", token="here:1:1:1")
    stored_at = datetime.now(UTC).timestamp()
    topic = definition.Resource(name="transaction")
    half = to_proto(message, TopicType.TRANSACTION, half_id, topic, now=stored_at + ahead, compress_above=None)
    half.system_properties.store_timestamp.FromMilliseconds(round(stored_at * 1000))
    half.user_properties["TRANSACTION_CHECK_TIMES"] = str(asked)
    return half


@pytest.fixture
def wire(stub: Stub) -> Iterator[Wire]:
    stub.brokers = [wire := Wire(stub.port)]
    yield wire
    wire.close()


class TestAnswer:
    @pytest.mark.parametrize(("answer", "resolution"), [(COMMIT, RESOLUTIONS.COMMIT), (ROLLBACK, RESOLUTIONS.ROLLBACK)])
    def test_is_sent_as_given(self, stub: Stub, open_at: OpenAt, answer: Resolution, resolution: int):
        open_at(stub.endpoints).listen(lambda half: answer)

        wait_until(lambda: stub.ask(question(), transaction_id="t7"))

        [end] = wait_until(lambda: stub.asked("EndTransaction"))
        assert (end.message_id, end.transaction_id, end.resolution) == ("m.1", "t7", resolution)
        assert end.source == definition.TransactionSource.SOURCE_SERVER_CHECK

    def test_is_nothing_where_nothing_is_known(
        self, stub: Stub, open_at: OpenAt, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ):
        answers: list[Resolution | Exception] = [UNKNOWN, ConnectionError("no database"), COMMIT]

        def ask(half: Half) -> Resolution:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr("outbox.brokers.rocketmq.check_backs.THREADS", 1)
        open_at(stub.endpoints).listen(ask)
        for number in range(3):
            wait_until(lambda n=number: stub.ask(question(f"m.{n}")))

        assert [end.message_id for end in wait_until(lambda: stub.asked("EndTransaction"))] == ["m.2"]
        assert "could not be answered; the server will ask again" in caplog.text

    def test_that_does_not_arrive_is_a_line_in_the_log_and_given_again(
        self, stub: Stub, open_at: OpenAt, caplog: pytest.LogCaptureFixture
    ):
        stub.fail("EndTransaction", grpc.StatusCode.DEADLINE_EXCEEDED, "no time left", times=1)
        open_at(stub.endpoints).listen(lambda half: COMMIT)

        wait_until(lambda: stub.ask(question()) and len(stub.asked("EndTransaction")) == 2)

        [record] = [one for one in caplog.records if "check-back" in one.getMessage()]
        assert "could not be answered; the server will ask again: DEADLINE_EXCEEDED no time left" in record.getMessage()
        assert record.exc_info is None

    def test_is_one_where_the_same_is_asked_again_meanwhile(self, stub: Stub, open_at: OpenAt):
        may_answer = threading.Event()
        asked: list[str] = []

        def ask(half: Half) -> Resolution:
            asked.append(half.half_id)
            may_answer.wait(60)
            return COMMIT

        open_at(stub.endpoints).listen(ask)
        for half_id in ("m.1", "m.1", "m.1", "other.1"):
            wait_until(lambda half_id=half_id: stub.ask(question(half_id)))
        wait_until(lambda: len(asked) == 2)

        may_answer.set()

        wait_until(lambda: len(stub.asked("EndTransaction")) == 2)
        assert sorted(asked) == ["m.1", "other.1"]
        # Asked later, answered again: again and again, since what was answered may not have ended on our side.
        wait_until(lambda: stub.ask(question("m.1")) and len(stub.asked("EndTransaction")) >= 3)


class TestAnswerAboutWhatIsVisible:
    """A COMMIT would make a copy of it; ROLLBACK only ends the asking."""

    @pytest.fixture
    def sent(self, stub: Stub) -> Callable[..., tuple[list[int], list[Resolution]]]:
        """Listen with a broker and ask it once; return what the server was sent, and what of it was noted."""

        def sent(broker: Broker, answer: Resolution = COMMIT) -> tuple[list[int], list[Resolution]]:
            noted: list[Resolution] = []
            broker.listen(lambda half: answer, on_other_answer=lambda half, resolution: noted.append(resolution))
            wait_until(lambda: stub.ask(question("m.1")))
            return [end.resolution for end in wait_until(lambda: stub.asked("EndTransaction"))], noted

        return sent

    @pytest.fixture
    def half(self, port: PortStub) -> StoredMessage:
        return port.log.append_half("transaction", "m.1")

    def test_is_rollback_and_noted(self, port: PortStub, open_here: OpenAt, half: StoredMessage, sent: Any):
        port.log.end(half.log_offset, half.queue_offset, requests.COMMIT_TYPE)

        assert sent(open_here()) == ([RESOLUTIONS.ROLLBACK], [ROLLBACK])

    def test_is_commit_where_only_another_attempt_is_visible(
        self, port: PortStub, open_here: OpenAt, half: StoredMessage, sent: Any
    ):
        other = port.log.append_half("transaction", "m.2")
        port.log.end(other.log_offset, other.queue_offset, requests.COMMIT_TYPE)

        assert sent(open_here()) == ([RESOLUTIONS.COMMIT], [])

    def test_is_commit_where_nothing_is(self, open_here: OpenAt, half: StoredMessage, sent: Any):
        assert sent(open_here()) == ([RESOLUTIONS.COMMIT], [])

    @pytest.mark.parametrize("trouble", ["busy", "no answer", "away"])
    def test_is_commit_where_that_cannot_be_told(
        self, port: PortStub, open_here: OpenAt, half: StoredMessage, sent: Any, trouble: str
    ):
        """A copy is better than a loss."""
        port.log.end(half.log_offset, half.queue_offset, requests.COMMIT_TYPE)
        if trouble == "busy":
            port.say(requests.QUERY_MESSAGE, 2, "[TIMEOUT_CLEAN_QUEUE]")
        elif trouble == "no answer":
            port.freeze(requests.QUERY_MESSAGE)
        else:
            port.stop()

        assert sent(open_here(REQUEST_TIMEOUT=timedelta(milliseconds=500))) == ([RESOLUTIONS.COMMIT], [])

    def test_is_commit_where_no_port_is_known(self, open_here: OpenAt, sent: Any):
        assert sent(open_here(NAME_SERVERS=[], UNCONFIRMED_ENDS=True)) == ([RESOLUTIONS.COMMIT], [])

    def test_is_looked_for_with_unconfirmed_ends_too(self, port: PortStub, open_here: OpenAt, half: StoredMessage, sent: Any):
        port.log.end(half.log_offset, half.queue_offset, requests.COMMIT_TYPE)

        assert sent(open_here(UNCONFIRMED_ENDS=True)) == ([RESOLUTIONS.ROLLBACK], [ROLLBACK])

    def test_is_not_looked_for_before_a_rollback(self, port: PortStub, open_here: OpenAt, half: StoredMessage, sent: Any):
        assert sent(open_here(), ROLLBACK) == ([RESOLUTIONS.ROLLBACK], [])
        assert port.asked(requests.QUERY_MESSAGE) == []


class TestClocks:
    @pytest.mark.parametrize(("ahead", "words"), [(10, "10.0 s ahead of"), (-10, "10.0 s behind")])
    def test_that_differ_are_named_once(
        self, stub: Stub, open_at: OpenAt, caplog: pytest.LogCaptureFixture, ahead: float, words: str
    ):
        open_at(stub.endpoints).listen(lambda half: COMMIT)
        for number in range(3):
            wait_until(lambda n=number: stub.ask(question(f"m.{n}", ahead=ahead)))

        wait_until(lambda: len(stub.asked("EndTransaction")) == 3)

        [text] = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
        assert words in text
        assert "NTP" in text

    @pytest.mark.parametrize("fields", [{"ahead": 0.9}, {"ahead": -0.9}, {"ahead": -600, "asked": 2}], ids=str)
    def test_that_agree_are_not_and_later_questions_tell_nothing(
        self, stub: Stub, open_at: OpenAt, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
    ):
        open_at(stub.endpoints).listen(lambda half: COMMIT)

        wait_until(lambda: stub.ask(question(**fields)))

        wait_until(lambda: stub.asked("EndTransaction"))
        assert [one for one in caplog.records if one.levelno == logging.ERROR] == []


class TestSession:
    def test_announces_topics_as_a_producer(self, stub: Stub, open_at: OpenAt):
        open_at(stub.endpoints).listen(lambda half: COMMIT)

        settings = wait_until(lambda: stub.asked("Telemetry"))[0].settings

        assert settings.client_type == definition.ClientType.PRODUCER
        assert [topic.name for topic in settings.publishing.topics] == ["transaction"]
        wait_until(lambda: stub.asked("Heartbeat"))

    def test_is_announced_again_and_again(self, stub: Stub, open_at: OpenAt, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(session, "ANNOUNCE_SECONDS", 0.05)

        open_at(stub.endpoints).listen(lambda half: COMMIT)

        wait_until(lambda: len(stub.asked("Telemetry")) >= 3 and len(stub.asked("Heartbeat")) >= 3)

    def test_is_opened_again_soon_after_the_proxy_was_away(self, stub: Stub, wire: Wire, open_at: OpenAt):
        open_at(wire.endpoints).listen(lambda half: COMMIT)
        wait_until(lambda: stub.ask(question()))
        back = Stub()
        back.brokers = [wire]
        wire.lead_to(back.port)
        stub.stop()

        wait_until(lambda: back.ask(question("later.1")), 60)  # the public client takes minutes

        wait_until(lambda: back.asked("EndTransaction"))
        back.stop()

    def test_is_opened_again_when_the_proxy_is_silent(
        self, stub: Stub, wire: Wire, open_at: OpenAt, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(session, "ANNOUNCE_SECONDS", 0.1)
        monkeypatch.setattr(session, "SILENCE_SECONDS", 0.5)
        open_at(wire.endpoints, REQUEST_TIMEOUT=timedelta(milliseconds=300)).listen(lambda half: COMMIT)
        wait_until(lambda: stub.ask(question()))

        wire.cut()

        wait_until(lambda: stub.ask(question("later.1")) and len(stub.asked("EndTransaction")) >= 2, 60)

    def test_is_opened_again_when_the_proxy_answers_all_but_the_stream(
        self, stub: Stub, open_at: OpenAt, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(session, "ANNOUNCE_SECONDS", 0.1)
        monkeypatch.setattr(session, "SILENCE_SECONDS", 0.5)
        open_at(stub.endpoints).listen(lambda half: COMMIT)
        [listener] = wait_until(lambda: stub.listeners)

        stub.freeze("Telemetry", times=1)

        wait_until(lambda: stub.listeners and stub.listeners != [listener])

    def test_is_not_kept_with_a_proxy_that_routes_name_no_more(
        self, stub: Stub, open_at: OpenAt, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("outbox.brokers.rocketmq.check_backs.ANNOUNCE_SECONDS", 0.05)
        monkeypatch.setattr("outbox.brokers.rocketmq.routes.ROUTE_SECONDS", 0.05)
        other = Stub()
        stub.brokers = [stub, other]
        open_at(stub.endpoints).listen(lambda half: COMMIT)
        wait_until(lambda: other.listeners)

        stub.brokers = [stub]

        wait_until(lambda: not other.listeners)
        assert stub.listeners
        other.stop()

    @pytest.fixture
    def asked_all_the_time(self, stub: Stub) -> Iterator[None]:
        half, over = question(), threading.Event()

        def ask() -> None:
            while not over.wait(0.0003):
                stub.ask(half)

        asking = threading.Thread(target=ask)
        asking.start()
        yield
        over.set()
        asking.join()

    def test_ends_with_its_broker_while_questions_come(self, stub: Stub, open_at: OpenAt, asked_all_the_time: None):
        for _ in range(20):
            before = len(stub.asked("EndTransaction"))
            broker = open_at(stub.endpoints)
            broker.listen(lambda half: COMMIT)
            wait_until(lambda before=before: len(stub.asked("EndTransaction")) > before)

            broker.close()  # raises where a session goes on

    def test_says_once_why_there_is_none(self, stub: Stub, open_at: OpenAt, caplog: pytest.LogCaptureFixture):
        stub.say("Telemetry", Code.UNAUTHORIZED, "who are you?")

        open_at(stub.endpoints).listen(lambda half: COMMIT)

        wait_until(lambda: len(stub.asked("Telemetry")) >= 3)
        [text] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert "who are you?" in text
