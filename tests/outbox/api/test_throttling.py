from datetime import timedelta

import pytest

from outbox.api.throttling import REMEMBERED, CheckBackThrottle, Repeats
from outbox.errors import ConfigurationError


class TestCheckBackThrottle:
    @pytest.mark.parametrize(
        ("rate", "means"),
        [("600/s", (600, 1)), ("50/10s", (50, 10)), ("100/min", (100, 60)), ("7/2hours", (7, 7200)), ("1/day", (1, 86400))],
    )
    def test_reads_its_rate_from_settings(self, settings, rate, means):
        settings.OUTBOX = {"CHECK_BACK": {"THROTTLE": rate}}

        throttle = CheckBackThrottle()

        assert (throttle.num_requests, throttle.duration) == means

    @pytest.mark.parametrize("rate", ["", "600", "600/", "many/s", "600/year", "6.5/s", "-1/s", "600/0s"])
    def test_says_how_a_rate_is_written(self, settings, rate):
        settings.OUTBOX = {"CHECK_BACK": {"THROTTLE": rate}}

        with pytest.raises(ConfigurationError, match="600/s"):
            CheckBackThrottle()


class TestRepeats:
    @pytest.fixture
    def now(self):
        return [100.0]

    @pytest.fixture
    def count(self, now):
        repeats = Repeats(clock=lambda: now[0])
        return lambda request_id: repeats.count(request_id, within=timedelta(minutes=10))

    def test_counts_each_request(self, count):
        assert [count("a"), count("b"), count("a"), count("a")] == [1, 1, 2, 3]

    def test_begins_anew_when_the_signature_holds_no_more(self, count, now):
        count("a")
        now[0] += 600

        assert count("a") == 1

    def test_forgets_the_oldest_of_very_many(self, count):
        count("first")
        for number in range(REMEMBERED):
            count(f"{number}")

        assert (count("first"), count(f"{REMEMBERED - 1}")) == (1, 2)
