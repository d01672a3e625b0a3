"""One Spark session for all tests. Without Java or pyspark they are skipped, and say so; in CI that is a failure."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings

from project.servers.jars import are_programs_here, fetch_jars

HERE = Path(__file__).parent
POM = HERE / "kafka_source_pom.xml"
JARS = Path(settings.BASE_DIR) / "var/kafka/source"

collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["*"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def jar() -> str:
    from outbox.pipeline.spark import PipelineError
    from outbox.pipeline.spark.session import find_jar

    try:
        return find_jar()
    except PipelineError:
        return ""


@pytest.fixture(scope="session")
def kafka_jars() -> str:
    """Return the folder with the jars of Spark's source for Kafka; "" where this machine cannot fetch them."""
    return str(fetch_jars(POM, JARS)) if are_programs_here() else ""


@pytest.fixture
def backslashes_escape(transactional_db: None) -> Iterator[None]:
    """A database in which a backslash in a statement's string is an escape."""
    from django.db import connection

    alter = f"ALTER DATABASE {connection.ops.quote_name(connection.settings_dict['NAME'])} "
    with connection.cursor() as cursor:
        cursor.execute(alter + "SET standard_conforming_strings = off")
        yield
        cursor.execute(alter + "RESET standard_conforming_strings")


@pytest.fixture(scope="session")
def spark(jar: str, kafka_jars: str, django_db_setup: None) -> Iterator[object]:
    from outbox.pipeline.spark import PipelineError
    from outbox.pipeline.spark.config import KafkaCluster, PipelineConfig, Source
    from outbox.pipeline.spark.session import build_session

    source = Source("postgresql://", reader="jdbc" if jar else "python")
    kafka = [KafkaCluster("any", {}, {}, [])] if kafka_jars else []
    config = PipelineConfig(source, kafka=kafka, kafka_jars=kafka_jars, driver_memory="1g", shuffle_partitions=2)
    try:
        session = build_session(config, is_light=True)
    except PipelineError as error:
        pytest.skip(str(error))
    yield session
    session.stop()


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, spark: object) -> dict[str, object]:
    """Return the tests of a file that are audited together, by name, each with its report; see `together`."""
    from tests.outbox.pipeline.spark.together import TESTS, audit_together

    given = {name: test(None) for name, test in TESTS[request.module.__name__].items()}
    reports = audit_together(spark, [next(test) for test in given.values()])
    return {name: (test, report) for (name, test), report in zip(given.items(), reports, strict=True)}


@pytest.fixture
def with_jar(jar: str) -> None:
    if not jar:
        pytest.skip("no PostgreSQL JDBC driver: apt-get install libpostgresql-jdbc-java")
