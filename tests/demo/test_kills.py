import subprocess
import sys

import pytest

from project.demo.kills import CONFIRMED, DECIDED, HALF_SENT, LONG_RUNNING, ROUNDS, UNACKED, Kill, Permits, one_phase_rounds

KILL = Kill(LONG_RUNNING, HALF_SENT)


@pytest.fixture
def permits(tmp_path):
    return Permits(tmp_path)


def pass_by(permits, process, place):
    """Run a process of the demo past a failpoint; return its id."""
    program = f"from outbox.failpoints import failpoint; failpoint({place!r})"
    child = subprocess.Popen([sys.executable, "-c", program], env=permits.environment(process))
    child.wait()
    return child.pid


class TestPermits:
    def test_kill_the_named_process_at_the_named_place(self, permits):
        permits.grant(KILL)

        pid = pass_by(permits, LONG_RUNNING, HALF_SENT)

        assert permits.is_used(KILL)
        assert list(permits.done()) == [(KILL, pid)]

    @pytest.mark.parametrize(("process", "place"), [(LONG_RUNNING, DECIDED), ("celery", HALF_SENT)])
    def test_leave_others_alone(self, permits, process, place):
        permits.grant(KILL)

        pass_by(permits, process, place)

        assert not permits.is_used(KILL)
        assert list(permits.done()) == []

    def test_count_each_kill_at_the_same_place(self, permits):
        for _ in range(2):
            permits.grant(KILL)
            pass_by(permits, LONG_RUNNING, HALF_SENT)

        assert [kill for kill, _ in permits.done()] == [KILL, KILL]

    def test_can_be_taken_back(self, permits):
        permits.grant(KILL)

        assert permits.revoke(KILL)
        assert not permits.revoke(KILL)
        pass_by(permits, LONG_RUNNING, HALF_SENT)
        assert list(permits.done()) == []

    def test_are_not_counted_while_the_process_lives(self, permits):
        with subprocess.Popen(["sleep", "60"]) as alive:
            (permits.folder / f"{LONG_RUNNING}.{HALF_SENT}.{alive.pid}").touch()

            assert list(permits.done()) == []
            alive.kill()


class TestRounds:
    @pytest.mark.parametrize("rounds", [ROUNDS, one_phase_rounds(CONFIRMED)], ids=["two phases", "one phase"])
    def test_kill_as_many_as_the_demo_promises(self, rounds):
        kills = [kill for one in rounds for kill in (one.long_running, one.celery, *one.consumers)]

        assert sum(kill.process == LONG_RUNNING for kill in kills) >= 2
        assert sum(kill.process == "celery" for kill in kills) >= 2
        assert sum(kill.is_of_relay for kill in kills) >= 5
        assert sum(kill.place == UNACKED for kill in kills) >= 5

    def test_end_halves_both_ways_at_least_three_times(self):
        places = [kill.place for one in ROUNDS for kill in (one.long_running, one.celery)]

        assert places.count(HALF_SENT) >= 3
        assert places.count(DECIDED) >= 3

    def test_of_one_phase_leave_copies_at_least_three_times_and_kill_the_broker_once(self):
        places = [kill.place for one in one_phase_rounds(CONFIRMED) for kill in (one.long_running, one.celery)]

        assert places.count(CONFIRMED) >= 3
        assert [one.kills_broker for one in one_phase_rounds(CONFIRMED)].count(True) == 1
