"""What holds for all tests: a skipped test is a failure in CI, and a test that commits leaves no rows behind."""

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.test import TransactionTestCase

from outbox import logs
from outbox.logs import Repeats, forget_lines

CI = os.environ.get("CI") == "true"

gc.disable()  # until all tests are collected; it would look at each of them again and again, which takes a third of the time


@pytest.fixture(autouse=True)
def _log_from_the_beginning() -> None:
    forget_lines()


@pytest.fixture(autouse=True)
def _no_loop_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the errors of the loops of earlier tests, which this process would send in its heartbeats."""
    from outbox.database import loop_errors

    monkeypatch.setattr(loop_errors, "_errors", {})


@pytest.fixture
def pass_in_log(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move the clock by which repeated lines of the log are left out by some seconds."""
    now = [0.0]
    monkeypatch.setattr(logs, "_repeats", Repeats(lambda: now[0]))

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


@pytest.fixture(autouse=True, scope="session")
def _flush_what_was_filled() -> Iterator[None]:
    if not settings.configured:  # a run of test_conftest's
        yield
        return
    from tests.flush import flush

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", flush)
        yield


@pytest.fixture(autouse=True, scope="session")
def _statements_are_text() -> Iterator[None]:
    """Refuse statements in bytes: agents that put comments into statements cannot."""
    execute = psycopg.Cursor.execute

    def refuse_bytes(cursor: psycopg.Cursor[Any], query: Any, *arguments: Any, **options: Any) -> psycopg.Cursor[Any]:
        if isinstance(query, bytes):
            raise TypeError(f"A statement in bytes: {query!r}")
        return execute(cursor, query, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", refuse_bytes)
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long: left to the end, it would keep one process busy while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if CI and exitstatus == pytest.ExitCode.OK and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = _skipped(config)
    if CI and skipped:
        terminalreporter.section("skipped in CI, which promises to run everything", sep="=", red=True)
        for report in skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            terminalreporter.write_line(f"{report.nodeid}: {reason}", red=True)


def _skipped(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("skipped", []) if reporter else []
