"""A temporary database for the demo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from outbox.testing.postgres import Postgres, PostgresError
from project.demo.processes import DemoError


@contextmanager
def own_database() -> Iterator[str]:
    """
    Yield the URL of an empty database, which is deleted after the block.

    It is created on the server of DATABASE_URL, whose own database is not touched; without DATABASE_URL, a server is started.
    """
    try:
        if given := os.environ.get("DATABASE_URL"):
            with _new_database(given) as url:
                yield url
        else:
            with Postgres() as server:
                yield server.url
    except PostgresError as error:
        raise DemoError(str(error)) from error


@contextmanager
def _new_database(given: str) -> Iterator[str]:
    name = f"outbox_demo_{os.getpid()}"
    try:
        with psycopg.connect(given, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except psycopg.Error as error:
        raise DemoError(f"No database could be created on the server of DATABASE_URL: {error}".rstrip()) from error
    try:
        yield urlsplit(given)._replace(path=f"/{name}").geturl()
    finally:
        with psycopg.connect(given, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
