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
    Return the URL of an empty database, deleted on leaving.

    It lies on the server that DATABASE_URL names, beside the database named there, which is not touched; else on a server
    that is started for it.
    """
    try:
        if given := os.environ.get("DATABASE_URL"):
            with _beside(given) as url:
                yield url
        else:
            with Postgres() as server:
                yield server.url
    except PostgresError as error:
        raise DemoError(str(error)) from error


@contextmanager
def _beside(given: str) -> Iterator[str]:
    name = f"outbox_demo_{os.getpid()}"
    try:
        with psycopg.connect(given, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except psycopg.Error as error:
        raise DemoError(f"No database can be made on the server of DATABASE_URL: {error}".rstrip()) from error
    try:
        yield urlsplit(given)._replace(path=f"/{name}").geturl()
    finally:
        with psycopg.connect(given, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
