"""One Spark session for all tests. Without Java or pyspark they are skipped, and say so; in CI that is a failure."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["test_*.py", "*/test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def jar() -> str:
    from outbox.pipeline.spark.errors import PipelineError
    from outbox.pipeline.spark.session import find_jar

    try:
        return find_jar()
    except PipelineError:
        return ""


@pytest.fixture(scope="session")
def spark(jar: str, django_db_setup: None) -> Iterator[object]:
    from outbox.pipeline.spark.config import PipelineConfig, Source
    from outbox.pipeline.spark.errors import PipelineError
    from outbox.pipeline.spark.session import build_session

    source = Source("postgresql://", reader="jdbc" if jar else "python")
    try:
        session = build_session(PipelineConfig(source, driver_memory="1g", shuffle_partitions=2), is_for_tests=True)
    except PipelineError as error:
        pytest.skip(str(error))
    yield session
    session.stop()


@pytest.fixture
def with_jar(jar: str) -> None:
    if not jar:
        pytest.skip("no PostgreSQL JDBC driver: apt-get install libpostgresql-jdbc-java")
