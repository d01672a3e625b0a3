"""
The pytest plugin: the fixture `outbox`, and an optional throw-away PostgreSQL server.

pytest loads it before settings are ready, so only the fixture imports Django.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

from outbox.testing.postgres import Postgres, PostgresError

if TYPE_CHECKING:
    from outbox.testing.kit import Outbox

DATABASE_URL = "DATABASE_URL"

SERVER = pytest.StashKey[str]()  # a description of the server that the tests use, if the option is set
STARTED = pytest.StashKey[bool]()  # present if this plugin has started the server


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, for one run or for all."""
    text = f"start a throw-away PostgreSQL for these tests, unless {DATABASE_URL} names a server"
    parser.getgroup("outbox").addoption("--outbox-postgres", action="store_true", help=text)
    parser.addini("outbox_postgres", type="bool", default=False, help=text)


# A wrapper runs before pytest-django, which reads the settings in this hook with tryfirst, too.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Start the server before settings are read: a conftest.py would be too late."""
    if early_config.known_args_namespace.outbox_postgres or early_config.getini("outbox_postgres"):
        early_config.stash[SERVER] = _serve(early_config)
    return (yield)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the server that the tests use, if the option is set."""
    server = config.stash.get(SERVER, None)
    return f"PostgreSQL: {server}" if server else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Raise an error if a server was started, but settings, which pytest-django has read by now, name another one."""
    if STARTED in config.stash and (hosts := _hosts_of_settings()) and None not in hosts.values():
        named = ", ".join(f"DATABASES[{alias!r}] names HOST {host!r}" for alias, host in hosts.items())
        raise pytest.UsageError(
            f"{named}, so the tests would not use the server that the option outbox_postgres starts. Leave HOST out, or read "
            f"{DATABASE_URL} in the settings; to use that host, leave the option out."
        )


@pytest.fixture
def outbox(db: None) -> Iterator[Outbox]:
    """The testing kit: `docs/how-to/test.md`."""
    from outbox.testing.kit import Outbox  # it imports models, and pytest loads this plugin before Django

    with Outbox() as kit:
        yield kit


def _serve(config: pytest.Config) -> str:
    """Start a server unless one is named, set its environment variables, and return its description."""
    if DATABASE_URL in os.environ:  # under pytest-xdist, the server of the parent process
        return f"the server of {DATABASE_URL}"
    server = Postgres()
    config.add_cleanup(server.stop)
    try:
        server.start()
    except PostgresError as error:
        raise pytest.UsageError(str(error)) from error
    _set_for_this_run(config, server.environment)
    config.stash[STARTED] = True
    return f"{server.version} of {server.programs}, started for these tests"


def _hosts_of_settings() -> dict[str, str | None]:
    """Return the HOST of each PostgreSQL database in settings; None if environment variables name the server."""
    django = sys.modules.get("django.conf")  # not imported here, since there may be no settings yet
    if django is None or not django.settings.configured:
        return {}
    return {
        alias: None if settings.get("HOST") in (None, "", os.environ.get("PGHOST")) else settings["HOST"]
        for alias, settings in django.settings.DATABASES.items()
        if "postgresql" in settings.get("ENGINE", "")
    }


def _set_for_this_run(config: pytest.Config, variables: dict[str, str]) -> None:
    before = {name: os.environ.get(name) for name in variables}

    def restore() -> None:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    config.add_cleanup(restore)
    os.environ.update(variables)
