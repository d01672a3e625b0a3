"""What brokers must be set to, and what they must let us do. Needs no server, but stubs of ours."""

from collections.abc import Callable
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import pytest

from outbox.brokers.base import Broker
from outbox.brokers.options import read_options
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.broker_checks import problems_of_clock, problems_of_retention, problems_of_settings
from outbox.brokers.rocketmq.group_checks import MIN_RETRIES
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.brokers.rocketmq.places import HALVES
from outbox.brokers.rocketmq.remoting import requests
from outbox.findings import BROKER_WEAK, Finding
from outbox.message import TopicSpec, TopicType
from tests.outbox.brokers.rocketmq.port_stub import SETTINGS, PortStub
from tests.outbox.brokers.rocketmq.stub import TOPICS

OpenHere = Callable[..., Broker]

OPTIONS = read_options(RocketMQOptions, {"ENDPOINTS": "proxy:8081", "NAME_SERVERS": ["namesrv:9876"]})


@pytest.fixture
def check(open_here: OpenHere) -> Callable[..., list[Finding]]:
    """Check a broker at the stubs, but for the topic that the stub of a proxy does not serve."""

    def check(**options: Any) -> list[Finding]:
        return [one for one in open_here(**options).check() if "opic 'delay'" not in one.text]

    return check


class TestSettings:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"flushDiskType": "ASYNC_FLUSH", "brokerRole": "SYNC_MASTER"},
            {"transactionOpBatchInterval": "1000", "transactionOpMsgMaxSize": "4096"},
            {"transactionTimeOut": "2000"},
        ],
        ids=str,
    )
    def test_are_right(self, settings: dict[str, str]):
        assert list(problems_of_settings("broker:10911", OPTIONS, SETTINGS | settings)) == []

    @pytest.mark.parametrize(
        ("settings", "words", "is_error"),
        [
            ({"transactionTimeOut": "1999"}, "COMMIT_WINDOW", False),
            ({"transactionCheckMax": "20"}, "CHECK_HORIZON", True),
            ({"transactionOpBatchInterval": "3000", "transactionOpMsgMaxSize": "4096"}, "transactionOpBatchInterval", False),
            ({"transactionOpMsgMaxSize": "4096"}, "only every 1:00:00", False),
            ({"flushDiskType": "ASYNC_FLUSH"}, "power", False),
            ({"transientStorePoolEnable": "true"}, "transientStorePoolEnable", True),
            ({"rejectTransactionMessage": "true"}, "rejectTransactionMessage", True),
            ({"messageIndexEnable": "false"}, "messageIndexEnable", True),
            ({"messageIndexEnable": "false", "messageIndexSafe": "false"}, "messageIndexEnable", True),
            ({"messageIndexSafe": "false"}, "messageIndexSafe", False),
        ],
    )
    def test_are_wrong(self, settings: dict[str, str], words: str, is_error: bool):
        [problem] = problems_of_settings("broker:10911", OPTIONS, SETTINGS | settings)

        assert "broker:10911" in problem.text
        assert words in problem.text
        assert (problem.id != BROKER_WEAK) is is_error


class TestRetention:
    @pytest.mark.parametrize(("hours", "days"), [(72, 7), (72, 4.5), (168, 8.5)])
    def test_may_be_longer_than_the_servers(self, hours: int, days: float):
        topics = [TopicSpec("orders", TopicType.NORMAL, remembered=timedelta(days=days))]

        assert list(problems_of_retention("broker:10911", {"fileReservedTime": str(hours)}, topics)) == []

    @pytest.mark.parametrize(("hours", "days"), [(72, 4), (168, 7)])
    def test_must_not_be_shorter(self, hours: int, days: float):
        topics = [TopicSpec("orders", TopicType.NORMAL, remembered=timedelta(days=days))]

        [problem] = problems_of_retention("broker:10911", {"fileReservedTime": str(hours)}, topics)

        assert f"keeps messages for {hours} hours" in problem.text
        assert f"inbox rows are kept for {days} days" in problem.text
        assert 'OUTBOX["RETENTION"]' in problem.hint

    def test_is_compared_with_that_of_each_broker(self, port: PortStub, check: Any):
        port.settings["fileReservedTime"] = "240"

        [problem] = check()

        assert "fileReservedTime" in problem.text


class TestGroups:
    WELL = MappingProxyType({"retryMaxTimes": MIN_RETRIES, "consumeMessageOrderly": False})

    def test_are_right(self, port: PortStub, check: Any):
        port.groups = {"normal": {"cart": {**self.WELL}}, "fifo": {"cart_fifo": {**self.WELL, "consumeMessageOrderly": True}}}

        assert check() == []

    def test_are_named_where_the_server_gives_up_soon(self, port: PortStub, check: Any):
        port.groups = {
            "normal": {"cart": {**self.WELL, "retryMaxTimes": 16}, "points": {**self.WELL}},
            "fifo": {"cart_fifo": {"retryMaxTimes": MIN_RETRIES - 1, "consumeMessageOrderly": True}},
        }

        plain, ordered = check()

        assert "17 deliveries to group cart of topic normal" in plain.text
        assert f"mqadmin updateSubGroup -b {port.address} -g cart -r {MIN_RETRIES} (" in plain.hint
        assert "group cart_fifo of topic fifo" in ordered.text
        assert f"-g cart_fifo -r {MIN_RETRIES} -o true (" in ordered.hint
        assert plain.id == BROKER_WEAK

    def test_are_named_where_the_server_keeps_no_order(self, port: PortStub, check: Any):
        port.groups = {"fifo": {"cart_fifo": {**self.WELL}}}

        [problem] = check()

        assert problem.id != BROKER_WEAK
        assert "does not keep order for group cart_fifo" in problem.text
        assert problem.hint.endswith("-o true")

    @pytest.mark.parametrize(
        ("code", "right"), [(requests.GROUPS_OF_TOPIC, "Get on Topic:"), (requests.GET_GROUP_CONFIG, "Get on Group:cart")]
    )
    def test_are_not_known_where_a_right_is_missing(self, port: PortStub, check: Any, code: int, right: str):
        port.groups = {"normal": {"cart": {**self.WELL}}}
        port.say(code, requests.NO_PERMISSION, "no right")

        [problem] = check(ACCESS_KEY="me", SECRET_KEY="secret")

        assert right in problem.text
        assert problem.id == BROKER_WEAK

    def test_that_are_gone_meanwhile_are_ignored(self, port: PortStub, check: Any):
        port.groups = {"normal": {"cart": {**self.WELL, "retryMaxTimes": 16}}}
        port.say(requests.GET_GROUP_CONFIG, requests.NO_SUCH_GROUP, "no such group")

        assert check() == []


class TestClock:
    @pytest.mark.parametrize("ahead", [-2.9, 0, 2.9])
    def test_may_differ_a_little(self, ahead: float):
        assert list(problems_of_clock("broker:10911", ahead)) == []

    @pytest.mark.parametrize("ahead", [-10, 10])
    def test_must_not_be_ten_seconds_off(self, ahead: float):
        [problem] = problems_of_clock("broker:10911", ahead)

        assert "differ by 10 s" in problem.text

    @pytest.mark.parametrize("off", [0, -60, 60])
    def test_is_read_from_what_a_broker_says_of_its_start(self, port: PortStub, check: Any, off: float):
        port.clock_ahead = off

        found = [problem.text for problem in check()]

        assert len(found) == (1 if off else 0)
        assert all("clock" in text for text in found)


class TestBroker:
    def test_is_right(self, port: PortStub, check: Any):
        assert check() == []

    def test_has_each_of_its_brokers_asked(self, port: PortStub, check: Any):
        other = PortStub("broker-b")
        port.brokers.append(other)
        other.settings["messageIndexSafe"] = "false"

        [problem] = check()

        assert other.address in problem.text
        other.stop()

    @pytest.mark.parametrize("code", [requests.GET_BROKER_CONFIG, requests.GET_RUNTIME_INFO, requests.END_TRANSACTION])
    def test_that_does_not_answer_cannot_be_asked(self, port: PortStub, check: Any, code: int):
        port.freeze(code)

        [problem] = check(REQUEST_TIMEOUT=timedelta(milliseconds=300))

        assert problem.id != BROKER_WEAK
        assert f"Broker {port.address} cannot be checked" in problem.text
        assert "allow connections to the port" in problem.hint

    def test_that_refuses_to_tell_its_settings_cannot_be_asked(self, port: PortStub, check: Any):
        port.say(requests.GET_BROKER_CONFIG, requests.NO_PERMISSION, "signature does not match")

        [problem] = check()

        assert "16: signature does not match" in problem.text
        assert "ACCESS_KEY" in problem.hint

    def test_cannot_be_asked_where_no_name_server_answers(self, port: PortStub, check: Any):
        port.stop()

        [problem] = check()

        assert problem.id != BROKER_WEAK
        assert "No name server returns the route" in problem.text


class TestRights:
    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (requests.END_TRANSACTION, ["Pub on Topic:transaction"]),
            (requests.QUERY_MESSAGE, ["Sub on Topic:transaction", f"Sub on Topic:{HALVES}"]),
            (requests.PULL_MESSAGE, [f"Sub on Topic:{HALVES} and Group:{requests.READER}"]),
        ],
    )
    def test_are_missing_where_a_broker_refuses(self, port: PortStub, check: Any, code: int, words: list[str]):
        port.say(code, requests.NO_PERMISSION, "no right")

        found = check(ACCESS_KEY="me", SECRET_KEY="secret")

        assert len(found) == len(words)
        assert all(one.id != BROKER_WEAK and word in one.text for one, word in zip(found, words, strict=True))

    def test_are_asked_for_by_what_changes_nothing(self, port: PortStub, check: Any):
        half = port.log.append_half("transaction", "m.1")

        check(ACCESS_KEY="me", SECRET_KEY="secret")

        assert list(port.log.messages) == [half.log_offset]
        assert port.log.ends == []
        assert all(one.fields["AccessKey"] == "me" for one in port.requests)

    def test_are_not_asked_for_without_topics_of_type_transaction(self, port: PortStub):
        options = {"ENDPOINTS": "127.0.0.1:1", "NAME_SERVERS": [port.address]}

        assert RocketMQBroker.check_settings(options, [TopicSpec("orders", TopicType.NORMAL)]) == []


class TestTopicsOfTypeTransaction:
    def test_need_the_brokers_own_ports(self):
        [problem] = RocketMQBroker.check_settings({"ENDPOINTS": "proxy:8081"}, TOPICS)

        assert problem.is_serious()
        assert "transaction" in problem.text
        assert "NAME_SERVERS" in problem.hint

    @pytest.mark.parametrize(
        "options", [{"NAME_SERVERS": ["namesrv:9876"]}, {"BROKER_ADDRESSES": {"broker-a": "broker:10911"}}], ids=str
    )
    def test_are_served_where_these_are_known(self, options: dict[str, Any]):
        assert RocketMQBroker.check_settings({"ENDPOINTS": "proxy:8081", **options}, TOPICS) == []

    @pytest.mark.parametrize("options", [{}, {"NAME_SERVERS": ["namesrv:9876"]}], ids=str)
    def test_may_be_lost_with_unconfirmed_ends(self, options: dict[str, Any]):
        [problem] = RocketMQBroker.check_settings({"ENDPOINTS": "proxy:8081", "UNCONFIRMED_ENDS": True, **options}, TOPICS)

        assert not problem.is_serious()
        assert "lost" in problem.text

    def test_are_checked_with_the_broker(self, check: Any):
        [problem] = check(NAME_SERVERS=[])

        assert "neither NAME_SERVERS nor BROKER_ADDRESSES" in problem.text

    @pytest.mark.parametrize("options", [{"ENDPOINTS": "proxy:8081"}, {"ENDPOINTS": "proxy:8081", "UNCONFIRMED_ENDS": True}])
    def test_are_none_of_a_broker_of_others(self, options: dict[str, Any]):
        topics = [topic for topic in TOPICS if topic.type is not TopicType.TRANSACTION]

        assert RocketMQBroker.check_settings(options, topics) == []


class TestConfirmedEnds:
    @pytest.mark.parametrize("is_unconfirmed", [False, True])
    def test_are_what_options_say(self, open_here: OpenHere, is_unconfirmed: bool):
        assert open_here(UNCONFIRMED_ENDS=is_unconfirmed).confirms_ends is not is_unconfirmed
