"""Histories of several tests, audited as one: an audit costs seconds, however little is in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from outbox.pipeline.spark.config import AuditedGroup, PipelineConfig
from outbox.pipeline.spark.findings import Breach, Report
from tests.outbox.pipeline.spark.worlds import World

Test = Callable[[Any], Generator[World, Report, None]]

TESTS: dict[str, dict[str, Test]] = defaultdict(dict)  # module -> qualified name -> test


def together(test: Test) -> Callable[..., None]:
    """Let a test yield its world, and go on with the report; the audit is one for all such tests of the file."""
    TESTS[test.__module__][test.__qualname__] = test

    def goes_on(self: object, reports: dict[str, tuple[Any, Report]]) -> None:
        given, report = reports[test.__qualname__]
        try:
            given.send(report)
        except StopIteration:
            return
        raise AssertionError("A test yields one world.")

    goes_on.__name__, goes_on.__doc__ = test.__name__, test.__doc__
    return goes_on


def audit_together(spark: Any, worlds: Sequence[World]) -> list[Report]:
    """Audit worlds in one history, in which each has topics, messages and entries of its own; return the report of each."""
    whole = World(config=_config([_marked_config(world.config, f".{nth}") for nth, world in enumerate(worlds)]))
    for nth, world in enumerate(worlds):
        entries = {entry.name for entry in world.config.business}
        for name, rows in world.frames.items():
            asked = [row for row in rows if name != "business" or row["subject"] in entries]
            whole.frames[name] += [_marked(row, f".{nth}") for row in asked]
        whole.recorded |= {f"{topic}.{nth}": recorded for topic, recorded in world.recorded.items()}
    report = whole.audit(spark)
    return [_report_of(report, f".{nth}") for nth in range(len(worlds))]


def _marked(row: dict[str, Any], mark: str) -> dict[str, Any]:
    return {name: f"{value}{mark}" if name in ("topic", "subject", "message_id") else value for name, value in row.items()}


def _marked_config(config: PipelineConfig, mark: str) -> PipelineConfig:
    def marked(topics: Sequence[str]) -> list[str]:
        return [f"{topic}{mark}" for topic in topics]

    return replace(
        config,
        business=[replace(entry, name=f"{entry.name}{mark}", topic=f"{entry.topic}{mark}") for entry in config.business],
        groups=[replace(group, topics=marked(group.topics)) for group in config.groups],
        seen_topics=marked(config.seen_topics),
        ordered_topics=marked(config.ordered_topics),
        recorded={f"{topic}{mark}": hidden for topic, hidden in config.recorded.items()},
    )


def _config(configs: Sequence[PipelineConfig]) -> PipelineConfig:
    """Return the configuration of all. They differ in topics only."""
    assert len({(config.since, config.settle_seconds, config.clock_tolerance_seconds) for config in configs}) == 1
    topics: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for group in [group for config in configs for group in config.groups]:
        topics[group.name, group.is_from_start] += group.topics
    return replace(
        configs[0],
        business=[entry for config in configs for entry in config.business],
        groups=[AuditedGroup(name, of_group, is_from_start) for (name, is_from_start), of_group in topics.items()],
        seen_topics=[topic for config in configs for topic in config.seen_topics],
        ordered_topics=[topic for config in configs for topic in config.ordered_topics],
        recorded={topic: hidden for config in configs for topic, hidden in config.recorded.items()},
    )


def _report_of(whole: Report, mark: str) -> Report:
    def plain(finding: Breach) -> Breach:
        return replace(
            finding,
            topic=finding.topic.removesuffix(mark),
            subject=finding.subject.removesuffix(mark),
            ids=tuple(message_id.removesuffix(mark) for message_id in finding.ids),
        )

    findings = [plain(finding) for finding in whole.findings if finding.topic.endswith(mark)]
    counts = {topic.removesuffix(mark): counts for topic, counts in whole.counts.items() if topic.endswith(mark)}
    return Report(findings, counts, whole.foreign)
