"""Servers for the services: a database of their own on the tests' server, and a Redis."""

import importlib.util
import shutil
import tempfile
from pathlib import Path

import psycopg
import pytest
from django.db import connection

from project.servers.redis import Redis

CLIENTS = {"confluent_kafka": "test_*kafka*.py", "rocketmq": "test_*rocketmq*.py"}

collect_ignore_glob = [files for client, files in CLIENTS.items() if not importlib.util.find_spec(client)]


@pytest.fixture(scope="module")
def folder():
    """What is /tmp in a container."""
    found = Path(tempfile.mkdtemp(prefix="outbox-docker-"))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(scope="module")
def database_url(django_db_setup, django_db_blocker):
    """A new database that other processes read."""
    with django_db_blocker.unblock():
        connection.ensure_connection()
        info = connection.connection.info
        dsn, password = info.dsn, info.password
        host, port, user = info.host, info.port, info.user
    name = f"{info.dbname}_docker"  # others may test on the same server
    with psycopg.connect(dsn, password=password, dbname="postgres", autocommit=True) as server:
        server.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        server.execute(f'CREATE DATABASE "{name}"')
        yield f"postgresql://{user}@:{port}/{name}?host={host}"
        server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(scope="module")
def books(database_url):
    """A connection to the shop's database."""
    with psycopg.connect(database_url, autocommit=True) as books:
        yield books


@pytest.fixture(scope="module")
def redis_url(folder):
    if not Redis.is_here():
        pytest.skip("There is no redis-server: apt-get install redis-server.")
    with Redis(folder) as server:
        yield server.url
