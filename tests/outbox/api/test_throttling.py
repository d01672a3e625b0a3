import pytest

from outbox.api.throttling import CheckBackThrottle
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
