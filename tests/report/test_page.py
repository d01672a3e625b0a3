import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.journeys.outcome import VARIABLE, Outcome
from tests.report.page import page

STORM = Outcome(
    run="relays",
    broker="kafka",
    seconds=60,
    faults={"broker killed": 3, "relay frozen": 0},
    messages=1000,
    lost=0,
    ghosts=0,
    copies=1,
    applied_twice=None,
    out_of_order=2,
    settled_seconds=4.4,
)


def record(*outcomes: Outcome, exit_code: int = 0, found: object = None) -> dict[str, object]:
    return {
        "at": "2026-01-31",
        "commit": "1234abcd",
        "seconds": 70,
        "exit_code": exit_code,
        "outcomes": [one.as_dict() for one in outcomes],
        "found": found,
    }


class TestAnOutcome:
    def test_is_appended_to_the_file_that_the_environment_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        file = tmp_path / "outcomes"
        monkeypatch.setenv(VARIABLE, str(file))

        for count in (1, 2):
            replace(STORM, faults=Counter({"broker killed": count})).write()

        assert [json.loads(line)["faults"] for line in file.read_text().splitlines()] == [
            {"broker killed": 1},
            {"broker killed": 2},
        ]


class TestThePage:
    def test_sums_what_broke_a_promise_by_broker(self):
        lost = replace(STORM, lost=1, faults={"relay killed": 2})

        shown = page({"storm on Kafka": record(STORM), "demo on Kafka": record(lost)}, {"Python": "3.11"})

        assert "| every committed message is published, and handled | - | 1 of 2,000, 5 faults | - |" in shown
        assert "| effects of a handler happen once | - | - |" in shown

    def test_has_a_row_for_each_run(self):
        shown = page({"storm on Kafka": record(STORM)}, {})

        assert "| storm on Kafka | Kafka | 60 | 3 | 1,000 | 0 | 0 | 1 | - | 2 | 4 |" in shown

    def test_names_a_run_that_has_failed(self):
        shown = page({"storm on Kafka": record(exit_code=1)}, {})

        assert "**storm on Kafka has failed**, exit code 1" in shown

    def test_counts_faults_by_kind_for_each_promise(self):
        consumers = replace(STORM, faults={"broker killed": 2}, copies=None, applied_twice=0)

        shown = page({"storm on Kafka": record(STORM), "consumers on Kafka": record(consumers)}, {})

        assert "| broker killed | 5 | 5 | 3 | 2 | 5 |" in shown
        assert "relay frozen" not in shown

    def test_names_the_rules_that_no_test_knows(self):
        found = [
            {"name": "fence", "rule": "A decision is fenced", "killed_by": "tests/outbox/test_a.py::test_b", "seconds": 1},
            {"name": "order", "rule": "A key is ordered", "killed_by": "", "seconds": 1},
        ]

        shown = page({"mutants": record(found=found)}, {})

        assert "took 2 rules out, one at a time. A test has failed for each of 1;\n" in shown
        assert "No test failed without: A key is ordered." in shown

    def test_sums_up_schedules_and_requests(self):
        kinds = {"embedded, uniform": 3, "embedded, bursts": 2, "transactions, uniform": 1}
        schedules = {"seconds": 10.0, "schedules": 6, "schedules_per_second": 0.6, "steps": 240, "failed_seeds": []}
        requests = {"requests": 3000, "statuses": {"401": 1200, "200": 1800}, "wrong": 0}

        shown = page(
            {
                "explorer": record(found=schedules | {"by_broker_and_kind": kinds}),
                "foreign requests": record(found=requests),
            },
            {},
        )

        assert "ran 6 seeded schedules with 240 steps in 10 s,\n0.6 a second, on models of 2 kinds of broker; 0 failed." in shown
        assert "got 3,000 requests" in shown
        assert "bytes:\n1,800 times status 200, 1,200 times status 401. 0 were answered wrong." in shown
