import os
import re
from pathlib import Path

import pytest

import outbox as package
from outbox.failpoints import VARIABLE, FailpointReached, failpoint
from outbox.testing.crash import PLACES, crash

OF_COMMANDS = {"archive", "recorder"}  # which a user's tests do not run in their own thread


class TestPlaces:
    def test_are_all_that_are_passed(self):
        folder = Path(package.__file__).parent
        passed = {name for file in folder.rglob("*.py") for name in re.findall(r'failpoint\("([^"]+)"\)', file.read_text())}

        assert {place for place in passed if place.partition(".")[0] not in OF_COMMANDS} == set(PLACES)


class TestCrash:
    def test_ends_the_block_at_the_place(self):
        reached = []

        with crash("relay.after_claim"):
            failpoint("relay.before_half")
            reached.append("before_half")
            failpoint("relay.after_claim")
            reached.append("after_claim")

        assert reached == ["before_half"]

    def test_knows_a_place_by_its_short_name(self):
        with crash("after_decide"):
            failpoint("relay.after_decide")

    def test_asks_which_of_two_is_meant(self):
        with pytest.raises(AssertionError, match=r"write relay.after_commit or consumer.after_commit"), crash("after_commit"):
            pass

    def test_lists_the_places_to_who_names_none(self):
        with (
            pytest.raises(AssertionError, match=r"no failpoint 'after_lunch'. Choices are: relay.after_claim, "),
            crash("after_lunch"),
        ):
            pass

    @pytest.mark.parametrize("place", PLACES)
    def test_fails_where_the_place_is_not_passed(self, place):
        with pytest.raises(AssertionError, match=rf"{place} was not reached, so nothing .* must"), crash(place):
            pass

    def test_leaves_other_failpoints_as_they_are(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "relay.after_send=raise")

        with pytest.raises(FailpointReached, match=r"relay.after_send"), crash("relay.after_half"):
            failpoint("relay.after_send")

        assert os.environ[VARIABLE] == "relay.after_send=raise"

    def test_leaves_nothing_behind(self, monkeypatch):
        monkeypatch.delenv(VARIABLE, raising=False)

        with crash("relay.after_half"):
            failpoint("relay.after_half")

        assert VARIABLE not in os.environ
