from datetime import timedelta

from outbox.outages import Backoff


def seconds(failures: int, random: float = 1.0) -> float:
    return Backoff(timedelta(seconds=1), timedelta(minutes=5), lambda: random)(failures).total_seconds()


class TestBackoff:
    def test_doubles_with_each_try(self):
        assert [seconds(failures) for failures in range(4)] == [1, 2, 4, 8]

    def test_has_a_limit(self):
        assert seconds(9) == seconds(10_000) == 300

    def test_is_spread_from_nothing_to_the_whole(self):
        assert [seconds(3, random) for random in (0.0, 0.5)] == [0, 4]
