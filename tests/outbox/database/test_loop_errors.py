"""The errors of loops that heartbeats carry."""

import pytest
from psycopg import errors

from outbox.database import loop_errors
from outbox.database.loop_errors import Loop, recording
from outbox.errors import BrokerUnavailable, LaneNotHeld, NotMigrated

LOOP = Loop("check loop", broker="default")


class TestAnError:
    def test_is_read_until_a_step_succeeds(self):
        with pytest.raises(BrokerUnavailable), recording(LOOP):
            raise BrokerUnavailable("nobody answers")
        noted = loop_errors.read("relay", "default", "default")
        with recording(LOOP):
            pass

        assert noted == {"check loop": "nobody answers"}
        assert loop_errors.read("relay", "default", "default") == {}

    @pytest.mark.parametrize("kind", [errors.InsufficientPrivilege, errors.DiskFull, errors.QueryCanceled])
    def test_of_the_database_is_noted_where_somebody_has_to_correct_it(self, kind):
        assert loop_errors.record(LOOP, kind("no"))

    @pytest.mark.parametrize("error", [errors.AdminShutdown(), errors.DeadlockDetected(), NotMigrated(), LaneNotHeld()])
    def test_that_passes_by_itself_is_not_noted(self, error):
        assert not loop_errors.record(LOOP, error)

    def test_is_forgotten_after_some_minutes_without_another(self, monkeypatch):
        loop_errors.record(LOOP, ValueError("no"))

        monkeypatch.setattr(loop_errors, "FORGET_SECONDS", 0.0)

        assert loop_errors.read("relay", "default", "default") == {}

    @pytest.mark.parametrize(
        ("kind", "names"), [("relay", ["check loop", "relay"]), ("consumer", ["consumer"]), ("checker", ["checker"])]
    )
    def test_is_carried_by_the_heartbeats_of_its_kind(self, kind, names):
        for name in ("relay", "consumer", "checker", "check loop"):
            loop_errors.record(Loop(name), ValueError("no"))

        assert sorted(loop_errors.read(kind, "default", "default", "cart")) == names

    def test_is_not_carried_by_the_heartbeats_of_others(self):
        loop_errors.record(Loop("relay", "default", "default"), ValueError("no"))

        assert loop_errors.read("relay", "other", "default") == {}
        assert loop_errors.read("relay", "default", "second") == {}
