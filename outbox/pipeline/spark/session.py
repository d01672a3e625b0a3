"""One Spark session, set so that times are UTC and Parquet is read by others."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import JavaMissing, PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_JAVA = 17
JARS = ("/usr/share/java/postgresql.jar", "/usr/share/java/postgresql-jdbc4.jar")
INSTALL_JAVA = "On Debian and Ubuntu: apt-get install default-jre-headless"
INSTALL_JAR = 'On Debian and Ubuntu: apt-get install libpostgresql-jdbc-java. Or read with reader="python", which needs none.'

LOGGING = Path(__file__).with_name("log4j2.properties")


def find_java() -> Path:
    """
    Return the java that Spark will start: JAVA_HOME's, else that on PATH.

    Raises:
        JavaMissing: there is none, or it is too old for Spark 4.
    """
    home = os.environ.get("JAVA_HOME")
    found = Path(home, "bin", "java") if home else Path(shutil.which("java") or "")
    if not found.is_file():
        where = f"JAVA_HOME is {home}, which holds no bin/java" if home else "there is no java on PATH"
        raise JavaMissing(f"Spark needs Java {OLDEST_JAVA} or newer, and {where}. {INSTALL_JAVA}")
    said = subprocess.run([found, "-version"], capture_output=True, text=True).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < OLDEST_JAVA:
        raise JavaMissing(f"Spark needs Java {OLDEST_JAVA} or newer, but {found} says: {said.strip()}. {INSTALL_JAVA}")
    return found


def find_jar(given: str = "") -> str:
    """
    Return the path of the PostgreSQL JDBC driver.

    Raises:
        PipelineError: it is not where it was said to be, nor where Debian puts it.
    """
    for path in [given] if given else JARS:
        if Path(path).is_file():
            return path
    raise PipelineError(f"The PostgreSQL JDBC driver is not at {given or ' or '.join(JARS)}. {INSTALL_JAR}")


def needs_jar(config: PipelineConfig) -> bool:
    return any(source.is_postgres and source.reader == "jdbc" for source in (config.outbox, *config.brokers))


def build_session(
    config: PipelineConfig, *, name: str = "outbox", is_light: bool = False, is_for_tests: bool = False
) -> SparkSession:
    """
    Start Spark, or join the session that runs in this process.

    `config.master` is used where nobody else has chosen one: under spark-submit, its master and memory stand.

    Args:
        is_light: the JVM only plans and adds, since workers read the files: it compiles no longer than that takes.
        is_for_tests: the same, and collects garbage by one thread.

    Raises:
        JavaMissing: there is no Java for it.
        PipelineError: pyspark or the JDBC driver is missing.
    """
    try:
        from pyspark.sql import SparkSession  # in here, to say what is missing
    except ImportError as error:
        raise PipelineError('pyspark is missing: pip install "django-transactional-outbox[spark]"') from error
    find_java()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # else it warns about the host's name
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # not started by spark-submit
        builder = builder.master(config.master).config("spark.driver.memory", config.driver_memory)
        if config.master.startswith("local"):
            let_workers_import_us()
            builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        if needs_jar(config):
            jars = sorted({find_jar(source.jar) for source in (config.outbox, *config.brokers) if source.is_postgres})
            builder = builder.config("spark.jars", ",".join(jars))
        options = ["-Duser.timezone=UTC", f"-Dlog4j2.configurationFile={LOGGING}", ROOM_FOR_CLASSES]
        options += [*LIGHT] if is_light or is_for_tests else []
        options += [ONE_COLLECTOR] if is_for_tests else []
        builder = builder.config("spark.driver.extraJavaOptions", " ".join(options))
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    return builder.config("spark.sql.shuffle.partitions", config.shuffle_partitions).getOrCreate()


def let_workers_import_us() -> None:
    """Put this package on the path of Python workers, which know neither sys.path nor where we were started."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, path)])


ROOM_FOR_CLASSES = "-XX:MetaspaceSize=256m"  # from 21 MB on, the JVM would look again and again for some that it can unload
LIGHT = ("-XX:TieredStopAtLevel=1", "-XX:InitiatingHeapOccupancyPercent=80")  # the heap need not be tidy, it will soon be gone
ONE_COLLECTOR = "-XX:+UseSerialGC"

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # INT96 otherwise, which few others read
    "spark.sql.parquet.compression.codec": "lz4_raw",  # read in half the time of snappy, written in the same
    "spark.sql.catalogImplementation": "in-memory",
}
