"""The harness of the contract, on a server that asks about half messages after a second."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from outbox import database
from outbox.brokers.base import Broker
from outbox.check_backs.ask import in_process
from outbox.check_backs.loop import Checker
from outbox.failpoints import VARIABLE, FailpointReached
from outbox.message import TopicType
from outbox.relay.rounds import Relay
from tests.clock import Clock
from tests.contracts.acts import Acts

HERE = Path(__file__).parent

FIGURE = "figure on RocketMQ"

collect_ignore_glob = [] if importlib.util.find_spec("rocketmq") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.rocketmq)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def harness(db: None) -> Iterator[object]:
    from tests.contracts.rocketmq import RocketMQHarness

    harness = RocketMQHarness()
    yield harness
    harness.close()


@pytest.fixture
def broker(harness) -> Broker:
    return harness.open()


@pytest.fixture
def acts(harness, broker: Broker) -> Acts:
    return Acts(harness, broker)


@pytest.fixture
def topic(harness, settings) -> object:
    """A topic of type transaction, in settings and in the database, and beside it the harness's others in settings."""
    from tests.factories import TopicFactory

    settings.OUTBOX = {
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.rocketmq.RocketMQBroker", "OPTIONS": harness.options()}},
        "TOPICS": {spec.name: {"TYPE": str(kind)} for kind, spec in harness.topics.items()},
    }
    return TopicFactory(name=harness.topic(TopicType.TRANSACTION), type="transaction")


@pytest.fixture
def connection() -> Iterator[database.Connection]:
    with database.connect("default") as connection:
        yield connection


@pytest.fixture
def checker(topic) -> Iterator[Checker]:
    """Answers from the database, as each relay does."""
    checker = Checker("default", "default", in_process("default"))
    checker.turn()
    yield checker
    checker.close()


@pytest.fixture
def die(monkeypatch: pytest.MonkeyPatch) -> Callable[[Relay, str], None]:
    """Run a relay that claims and sends, and ends at a failpoint."""

    def die(relay: Relay, place: str) -> None:
        monkeypatch.setenv(VARIABLE, f"{place}=raise")
        with pytest.raises(FailpointReached):
            relay.step()
        monkeypatch.delenv(VARIABLE)

    return die


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Note a figure, which is shown behind the tests; it goes along with the test's report, perhaps from another process."""
    return lambda name, value: record_property(FIGURE, f"RocketMQ: {name}: {value:.1f}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    figures = [text for report in reports for name, text in report.user_properties if name == FIGURE]
    for text in dict.fromkeys(figures):
        terminalreporter.write_line(text)


@pytest.fixture
def server(figure: Callable[[str, float], None]) -> object:
    from tests.rocketmq_node import server

    figure("seconds till the server was ready", server().ready_after)
    return server()


@pytest.fixture
def clock() -> Clock:
    """A clock that stands until it is moved on, whereas a machine may stall for seconds."""
    return Clock()


@pytest.fixture
def stub() -> Iterator[object]:
    from tests.outbox.brokers.rocketmq.stub import Stub

    stub = Stub()
    yield stub
    stub.stop()


@pytest.fixture
def port() -> Iterator[object]:
    """A broker's own port, and a name server in one."""
    from tests.outbox.brokers.rocketmq.port_stub import PortStub

    port = PortStub()
    yield port
    port.stop()


@pytest.fixture
def open_at() -> Iterator[Callable[..., Broker]]:
    """Open brokers at an endpoint, and close them in the end."""
    from outbox.brokers.rocketmq import RocketMQBroker
    from tests.outbox.brokers.rocketmq.stub import TOPICS

    opened: list[Broker] = []

    def open_one(endpoints: str, *, clocks: Mapping[str, Callable[[], float]] | None = None, **options: object) -> Broker:
        opened.append(RocketMQBroker("default", {"ENDPOINTS": endpoints, **options}, TOPICS, **clocks or {}))
        return opened[-1]

    yield open_one
    for broker in opened:
        broker.close()


@pytest.fixture
def open_here(open_at: Callable[..., Broker], stub: object, port: object) -> Callable[..., Broker]:
    """Open brokers at the stubs of a proxy and of a broker's own port."""

    def open_here(**options: object) -> Broker:
        return open_at(stub.endpoints, **{"NAME_SERVERS": [port.address], **options})

    return open_here
