"""
pytest plugin: start a PostgreSQL for the tests before pytest-django reads the settings.

With DATABASE_URL set, that server is used instead. Loaded by `-p tests.plugin_postgres`: no conftest.py is early enough.
"""

import os
from collections.abc import Generator

import pytest

from outbox.testing.postgres import Postgres, PostgresError

SERVER = pytest.StashKey[str]()


# A wrapper, since pytest-django asks to be called first, too.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    if "DATABASE_URL" in os.environ:
        early_config.stash[SERVER] = "the server DATABASE_URL names"
    else:
        server = Postgres()
        early_config.add_cleanup(server.stop)
        try:
            server.start()
        except PostgresError as error:
            raise pytest.UsageError(str(error)) from error
        os.environ["DATABASE_URL"] = server.url
        early_config.add_cleanup(lambda: os.environ.pop("DATABASE_URL", None))
        early_config.stash[SERVER] = f"{server.version} of {server.programs}, started for these tests"
    return (yield)


def pytest_report_header(config: pytest.Config) -> str:
    return f"PostgreSQL: {config.stash[SERVER]}"
