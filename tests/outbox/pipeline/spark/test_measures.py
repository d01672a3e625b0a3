import pytest

from outbox.pipeline.spark.measures import BacklogCause, BacklogMinute, backlog_states

CALM = 60  # minutes before anything changes


def course(length, *, produced=100, consumed=100, deliveries=None):
    """A calm hour, then minutes of that kind."""
    calm = [BacklogMinute(minute, 100, 100, 100) for minute in range(CALM)]
    tried = consumed if deliveries is None else deliveries
    return calm + [BacklogMinute(minute, produced, tried, consumed) for minute in range(CALM, CALM + length)]


class TestACalmHour:
    def test_has_no_cause(self):
        assert {one.cause for one in backlog_states(course(0))} == {BacklogCause.NONE}

    def test_is_empty_where_nothing_happened(self):
        assert backlog_states([]) == []


class TestABacklog:
    @pytest.mark.parametrize(
        ("change", "cause"),
        [
            ({"produced": 200}, BacklogCause.PRODUCTION_FASTER),
            ({"consumed": 50}, BacklogCause.CONSUMPTION_SLOWER),
            ({"consumed": 33, "deliveries": 100}, BacklogCause.RETRIES),
            ({"produced": 110, "consumed": 95}, BacklogCause.STEADY_OVERLOAD),
        ],
    )
    def test_has_a_cause_and_an_onset(self, change, cause):
        last = backlog_states(course(10, **change))[-1]

        assert (last.cause, last.onset) == (cause, CALM)

    @pytest.mark.parametrize(
        ("change", "cause"),
        [({"produced": 200}, BacklogCause.PRODUCTION_FASTER), ({"consumed": 50}, BacklogCause.CONSUMPTION_SLOWER)],
    )
    def test_keeps_the_cause_it_began_with(self, change, cause):
        last = backlog_states(course(120, **change))[-1]

        assert (last.cause, last.onset) == (cause, CALM)

    def test_is_a_new_one_after_it_has_stopped_growing(self):
        minutes = course(30, produced=200)
        end = minutes[-1].minute
        minutes += [BacklogMinute(end + n, 200, 200, 200) for n in range(1, 40)]
        minutes += [BacklogMinute(end + 40 + n, 200, 80, 80) for n in range(10)]

        found = backlog_states(minutes)

        assert found[-15].cause is BacklogCause.NONE
        assert (found[-1].cause, found[-1].onset) == (BacklogCause.CONSUMPTION_SLOWER, end + 40)

    def test_counts_what_has_not_been_finished(self):
        assert backlog_states(course(10, produced=150))[-1].backlog == 500

    def test_goes_on_over_minutes_without_a_row(self):
        found = backlog_states([BacklogMinute(1, 10, 5, 5), BacklogMinute(4, 0, 5, 5)])

        assert [one.backlog for one in found] == [5, 5, 5, 0]
