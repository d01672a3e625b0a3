"""What a run with faults has left behind, for the report: `make report`."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

VARIABLE = "OUTBOX_OUTCOMES"
"""The file that outcomes are appended to, as lines of JSON."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """
    What was done, and what was counted. A count is None where the run does not count it.

    Args:
        run: its name in the report.
        seconds: of faults; None: as many as the work took.
        faults: how often each of them was done.
        messages: that were committed.
        lost: committed, and not at the broker, or not handled.
        ghosts: at the broker or handled, and not committed.
        copies: messages that are at the broker more than once.
        applied_twice: messages whose handler's effects are there more than once.
        out_of_order: messages that came before an earlier one of their key.
        settled_seconds: from the last fault until nothing was left to do.
    """

    run: str
    broker: str
    seconds: float | None
    faults: Mapping[str, int]
    messages: int
    lost: int
    ghosts: int | None
    copies: int | None
    applied_twice: int | None
    out_of_order: int | None
    settled_seconds: float | None
    nodes: int = 1

    def write(self) -> None:
        """Append it to the file that the environment variable names, if it names one."""
        if path := os.environ.get(VARIABLE):
            with Path(path).open("a") as file:
                file.write(json.dumps(self.as_dict()) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return it with plain values: `asdict` counts the items of a Counter anew."""
        return asdict(replace(self, faults=dict(self.faults)))
