from datetime import timedelta

import pytest

from outbox import RetryLater, RetryPolicy
from outbox.conf import RETRY_DELAYS
from outbox.errors import ConfigurationError


class TestRetry:
    @pytest.mark.parametrize(
        ("policy", "text"),
        [
            ({"limit": -1}, r"RetryPolicy\(limit=-1, jitter=0.1\) is not valid: limit must be an integer of at least 0"),
            ({"jitter": 2}, r"RetryPolicy\(limit=16, jitter=2\) is not valid: .*jitter a number from 0 to 1"),
            ({"delays": []}, "pass at least one timedelta"),
            ({"delays": [timedelta(seconds=-1)]}, "none below zero"),
            ({"limit": "3"}, "limit must be an integer"),
            ({"delays": [5]}, "is not valid"),
            ({"on": ("ValueError",)}, "pass exception classes"),
        ],
    )
    def test_refuses_what_is_no_policy(self, policy, text):
        with pytest.raises(ConfigurationError, match=text):
            RetryPolicy(**policy)

    def test_takes_a_list_of_errors(self):
        assert RetryPolicy(on=[KeyError, ValueError]).on == (KeyError, ValueError)

    def test_has_rocketmqs_delays(self):
        policy = RetryPolicy(jitter=0)

        assert [policy.delay(failures) for failures in range(1, 19)] == list(RETRY_DELAYS)

    def test_stays_at_the_last_delay(self):
        assert RetryPolicy(delays=[timedelta(seconds=1)], jitter=0).delay(9) == timedelta(seconds=1)

    def test_allows_as_many_retries_as_its_limit(self):
        policy = RetryPolicy(limit=16)

        assert policy.allows(16)
        assert not policy.allows(17)

    def test_shifts_each_wait_by_its_jitter(self):
        policy = RetryPolicy(delays=[timedelta(seconds=10)], jitter=0.1)

        waits = {policy.delay(1) for _ in range(100)}

        assert len(waits) > 50
        assert timedelta(seconds=9) <= min(waits) <= max(waits) <= timedelta(seconds=11)


class TestRetryLater:
    def test_takes_seconds_or_a_timedelta(self):
        assert RetryLater(5).after == RetryLater(timedelta(seconds=5)).after

    def test_says_so_where_it_gets_a_reason_alone(self):
        with pytest.raises(TypeError, match=r"RetryLater takes seconds or a timedelta, then a reason, not 'busy'\."):
            RetryLater("busy")  # type: ignore[arg-type]
