"""Histories of several tests, audited as one: an audit costs seconds, however little is in it."""

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from inspect import isgeneratorfunction
from typing import Any

import pytest

from outbox.pipeline.spark.config import AuditedGroup
from outbox.pipeline.spark.findings import Breach, Report
from tests.outbox.pipeline.spark.worlds import World

Test = Callable[[Any], Generator[World, Report, None]]

TESTS: dict[str, dict[str, Test]] = defaultdict(dict)  # module -> qualified name -> test
MARKED = ("topic", "subject", "message_id")


def together(tests: type) -> type:
    """Return a class whose tests yield a world each, and go on with its report; all such classes of a file share an audit."""
    for name, test in [*vars(tests).items()]:
        if isgeneratorfunction(test):
            TESTS[tests.__module__][test.__qualname__] = test
            setattr(tests, name, _with_report(test))
    return tests


def _with_report(test: Test) -> Callable[..., None]:
    def with_report(self: object, reports: dict[str, tuple[Any, Report]]) -> None:
        given, report = reports[test.__qualname__]
        with pytest.raises(StopIteration):  # a test yields one world
            given.send(report)

    return with_report


def audit_together(spark: Any, worlds: Sequence[World]) -> list[Report]:
    """Audit worlds in one history, in which each has topics, entries and messages of its own; return the report of each."""
    no_topics: dict[str, Any] = {"business": [], "groups": [], "seen_topics": [], "ordered_topics": [], "recorded": {}}
    whole = World(config=replace(worlds[0].config, **no_topics))
    groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for nth, world in enumerate(worlds):
        mark, config = f".{nth}", world.config
        assert replace(config, **no_topics) == replace(worlds[0].config, **no_topics)
        whole.set(
            business=[
                *whole.config.business,
                *(replace(entry, name=entry.name + mark, topic=entry.topic + mark) for entry in config.business),
            ],
            seen_topics=[*whole.config.seen_topics, *(topic + mark for topic in config.seen_topics)],
            ordered_topics=[*whole.config.ordered_topics, *(topic + mark for topic in config.ordered_topics)],
            recorded=whole.config.recorded | {topic + mark: hidden for topic, hidden in config.recorded.items()},
        )
        whole.recorded |= {topic + mark: recorded for topic, recorded in world.recorded.items()}
        for group in config.groups:
            groups[group.name, group.is_from_start] += [topic + mark for topic in group.topics]
        if not config.business:
            world.frames["business"] = []
        for name, rows in world.frames.items():
            marked = ({column: value + mark if column in MARKED else value for column, value in row.items()} for row in rows)
            whole.frames[name] += marked
    whole.set(groups=[AuditedGroup(name, topics, is_from_start) for (name, is_from_start), topics in groups.items()])
    report = whole.audit(spark)
    marks = tuple(f".{nth}" for nth in range(len(worlds)))
    assert [finding for finding in report.findings if not finding.topic.endswith(marks)] == []
    return [_report_of(report, mark) for mark in marks]


def _report_of(whole: Report, mark: str) -> Report:
    def plain(finding: Breach) -> Breach:
        topic, subject, *ids = (text.removesuffix(mark) for text in (finding.topic, finding.subject, *finding.ids))
        return replace(finding, topic=topic, subject=subject, ids=tuple(ids))

    findings = [plain(finding) for finding in whole.findings if finding.topic.endswith(mark)]
    counts = {topic.removesuffix(mark): counts for topic, counts in whole.counts.items() if topic.endswith(mark)}
    return Report(findings, counts, whole.foreign)
