"""The long-running checker, where there is nothing for it to do. It works in tests/outbox/brokers/rocketmq/test_relay.py."""

import pytest
from django.core.management import CommandError, call_command


class TestOutboxChecker:
    def test_says_that_no_broker_asks(self):
        with pytest.raises(CommandError, match="None of the brokers sends check-backs to producers"):
            call_command("outbox_checker")

    def test_says_that_there_is_no_such_broker(self):
        with pytest.raises(CommandError, match="nowhere"):
            call_command("outbox_checker", broker=["nowhere"])
