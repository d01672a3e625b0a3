"""The explorer itself: its parts, some seeds, and one rule whose absence it finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.explorer.compare import Found, Placed, problems
from tests.explorer.policies import Replayed
from tests.explorer.scheduler import Actor, Decision, Fault, Killed, Scheduler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FAULTS = (Fault.LOST_REQUEST, Fault.KILL)


def stepping(*labels: str, seen: list[str]) -> Callable[[Actor], None]:
    """Return the body of an actor that makes steps and notes them."""

    def body(actor: Actor) -> None:
        for label in labels:
            fault = actor.stop(label, FAULTS)
            seen.append(f"{actor.name}{label}{'!' if fault else ''}")

    return body


def run(decisions: Sequence[Decision], *actors: Actor) -> list[str]:
    return Scheduler(actors, Replayed(decisions)).run().lines


def actor(name: str, *labels: str, seen: list[str]) -> Actor:
    return Actor(name, stepping(*labels, seen=seen), on_kill=lambda actor: seen.append(f"{actor.name} is killed"))


class TestTheScheduler:
    def test_lets_the_actors_go_on_as_decided(self):
        seen: list[str] = []

        run([Decision("b"), Decision("a"), Decision("b")], actor("a", "1", "2", seen=seen), actor("b", "1", "2", seen=seen))

        assert seen == ["b1", "a1", "b2", "a2"]

    def test_hands_a_fault_to_the_step(self):
        seen: list[str] = []

        lines = run([Decision("a", Fault.LOST_REQUEST)], actor("a", "1", "2", seen=seen))

        assert seen == ["a1!", "a2"]
        assert [line.split(None, 1)[1] for line in lines] == ["1 [the request is lost]", "2"]

    def test_closes_the_connections_of_an_actor_that_is_killed_before_its_next_step(self):
        seen: list[str] = []

        run([Decision("a"), Decision("a", Fault.KILL)], actor("a", "1", "2", "3", seen=seen))

        assert seen == ["a1", "a is killed"]

    def test_lets_nothing_that_a_killed_actor_still_does_have_an_effect(self):
        seen: list[str] = []

        def body(actor: Actor) -> None:
            try:
                actor.stop("1", FAULTS)
            finally:
                with pytest.raises(Killed):
                    actor.stop("tidy up")
                seen.append("unwound")

        run([Decision("a", Fault.KILL)], Actor("a", body, on_kill=lambda actor: None))

        assert seen == ["unwound"]

    def test_goes_on_without_an_actor_that_waits_for_a_lock(self):
        seen: list[str] = []

        def body(actor: Actor) -> None:
            actor.stop("1")
            while "b1" not in seen:
                actor.block()
            actor.resume()
            seen.append("a went on")

        run([Decision("a"), Decision("b")], Actor("a", body, on_kill=lambda actor: None), actor("b", "1", seen=seen))

        assert seen == ["b1", "a went on"]

    def test_names_the_actor_that_failed(self):
        def body(actor: Actor) -> None:
            actor.stop("1")
            raise ValueError

        with pytest.raises(RuntimeError, match="a failed after '1'"):
            run([], Actor("a", body, on_kill=lambda actor: None))


class TestAReplay:
    def test_skips_decisions_that_cannot_be_followed(self):
        seen: list[str] = []
        decisions = [Decision("gone"), Decision("b"), Decision("b"), Decision("b"), Decision("a")]

        run(decisions, actor("a", "1", seen=seen), actor("b", "1", seen=seen))

        assert seen == ["b1", "a1"]


def found(**changes: Any) -> Found:
    orders = [Placed(1, "plain", "", 1), Placed(2, "keyed", "a", 2), Placed(3, "keyed", "a", 3)]
    whole: dict[str, Any] = {"orders": orders, "unfinished": [], "copies": [1, 2, 3], "inbox": 3, "effects": [1, 2, 3]}
    return Found(**{**whole, **changes})


class TestTheComparison:
    def test_finds_nothing_where_all_is_as_promised(self):
        assert problems(found(), once=frozenset({"plain", "keyed"})) == []

    @pytest.mark.parametrize(
        ("changes", "kind"),
        [
            ({"copies": [2, 3]}, "lost"),
            ({"copies": [1, 2, 3, 4]}, "ghost"),
            ({"copies": [1, 1, 2, 3]}, "double"),
            ({"effects": [1, 2]}, "unhandled"),
            ({"effects": [1, 2, 2, 3]}, "handled twice"),
            ({"inbox": 4}, "inbox"),
            ({"unfinished": ["ticket"]}, "unfinished"),
            ({"copies": [1, 3, 2]}, "order"),
            ({"effects": [1, 3, 2]}, "order"),
        ],
    )
    def test_names_what_is_wrong(self, changes, kind):
        wrong = problems(found(**changes), once=frozenset({"plain"}))

        assert {one.partition(":")[0] for one in wrong} == {kind}

    def test_allows_a_second_copy_where_at_least_once_is_promised(self):
        assert problems(found(copies=[1, 2, 2, 3]), once=frozenset({"plain"})) == []


def start(report: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.explorer", "--seconds", "60", "--json", str(report), *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


class TestASeed:
    def test_goes_the_same_way_each_time(self, tmp_path):
        reports = [tmp_path / "one.json", tmp_path / "other.json"]

        runs = [start(report, "--schedules", "8") for report in reports]

        for one in runs:
            output, _ = one.communicate()
            assert one.returncode == 0, output
        one, other = (json.loads(report.read_text()) for report in reports)
        assert one["schedules"] == 8
        assert one["digest"] == other["digest"]


class TestAControl:
    def test_finds_a_rule_that_is_taken_out(self, tmp_path):
        report = tmp_path / "report.json"

        run = start(report, "--control", "--mutant", "send-first")

        output, _ = run.communicate()
        assert run.returncode == 0, output
        [row] = json.loads(report.read_text())
        assert row["found"].startswith("lost: ")
        assert "broker.send" in row["trace"]
