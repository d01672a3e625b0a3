"""
Start Spark for a job: the session in the driver, and the executors of a cluster.

    configuration -> build_session -> the driver's JVM -- a zip of this package --> executors -- what they lack --> one error
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module, metadata
from importlib.abc import Traversable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from outbox.pipeline.spark import JavaMissing, PipelineError
from outbox.pipeline.spark.config import PipelineConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Steps:
    """
    Measures the seconds that each step of a job takes; steps run one after the other.

    Args:
        log: called with the name of each step when it begins. Steps also call it with lines about their progress.
    """

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self.log = log
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run the block as a step, and measure it."""
        self.log(name)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 2)


PACKAGE = "django-transactional-outbox"


def code_version() -> str:
    """Return version and digest of the code, as `1.0+3f2a9c0d1b7e`; `unknown+…` if the package was copied and not installed."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = "unknown"
    return f"{version}+{source_digest()}"


def source_digest() -> str:
    """Return the digest of the source files that this process imports the pipeline from, in a folder or a zip."""
    total = hashlib.sha256()
    for name, content in sorted(_sources(files("outbox.pipeline.spark"), "")):
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()[:12]


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, name)
        elif name.endswith(".py"):
            yield name, entry.read_bytes()


ROOT = Path(__file__).resolve().parents[3]
SHIPPED_FILES = ("__init__.py", "database/__init__.py", "database/locks.py", "pipeline/__init__.py", "pipeline/spark/**/*.py")
NEEDED_MODULES = ("numpy", "pandas", "pyarrow")

PYTHON_CANNOT_RUN = (
    "The executors cannot run Python {version} as {python!r}: {reason}. Set PYSPARK_PYTHON to the path of a "
    "Python of this minor version on the executors."
)
EXECUTORS_UNFIT = (
    "The executors cannot run the job. {faults}. Set PYSPARK_PYTHON to the path of a Python on the executors that has the "
    "driver's packages."
)


def prepare_executors(spark: SparkSession, config: PipelineConfig) -> None:
    """
    Send this package to the executors, and check their Python with one small job. With a local master, neither is necessary.

    Raises:
        PipelineError: an executor has another minor version of Python, lacks a package, or uses another release of this one.
    """
    context = spark.sparkContext
    if context.master.startswith("local"):
        return
    context.addPyFile(str(_zipped()))
    is_psycopg_needed = any(source.is_postgres and source.reader == "python" for source in (config.outbox, *config.brokers))
    modules = (*NEEDED_MODULES, "psycopg") if is_psycopg_needed else NEEDED_MODULES
    slots = context.defaultParallelism
    try:
        faults = context.parallelize(range(slots), slots).mapPartitions(partial(find_faults, modules, source_digest())).collect()
    except Exception as error:  # an error of py4j: the worker did not start, or could not import this module
        match = re.search(r"\w*(?:Error|IOException): (.+)", str(error))
        reason = (match[1] if match else str(error)).rstrip(".")
        values = {"version": platform.python_version(), "python": context.pythonExec, "reason": reason}
        raise PipelineError(PYTHON_CANNOT_RUN.format(**values)) from error
    if faults:
        raise PipelineError(EXECUTORS_UNFIT.format(faults="; ".join(sorted(set(faults)))))


def find_faults(modules: Sequence[str], digest: str, _: Iterable[int]) -> Iterator[str]:
    """Yield the reasons why this process cannot be an executor of a driver whose code has this digest."""
    process = f"{platform.node()}, {sys.executable}"
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            yield f"{process}: {error}"
    if source_digest() != digest:
        yield f"{process}: {__file__} is of another release of django-transactional-outbox"


def _zipped() -> Path:
    """
    Write the modules that executors import to a zip. It stays until exit, because executors that start later fetch it, too.
    """
    folder = tempfile.mkdtemp(prefix="outbox-executors-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, f"outbox-{source_digest()}.zip")
    with ZipFile(path, "w") as package:
        for pattern in SHIPPED_FILES:
            for file in sorted((ROOT / "outbox").glob(pattern)):
                package.write(file, file.relative_to(ROOT))
    return path


OLDEST_JAVA = 17
JARS = ("/usr/share/java/postgresql.jar", "/usr/share/java/postgresql-jdbc4.jar")
INSTALL_JAVA = "On Debian and Ubuntu: apt-get install default-jre-headless"
ADD_USER = (
    'Add one when the container starts: echo "outbox:x:$(id -u):$(id -g)::/tmp:/sbin/nologin" >> /etc/passwd. If that file '
    "cannot be written, install libnss-wrapper, and set LD_PRELOAD=libnss_wrapper.so, NSS_WRAPPER_PASSWD and NSS_WRAPPER_GROUP."
)
INSTALL_JAR = 'On Debian and Ubuntu: apt-get install libpostgresql-jdbc-java. Or read with reader="python", which needs none.'
KAFKA_PACKAGE = "org.apache.spark:spark-sql-kafka-0-10_2.13:{version}"
INSTALL_KAFKA_JARS = (
    'Set OUTBOX["PIPELINE"]["KAFKA_JARS"] to a folder with the jars of spark-sql-kafka-0-10, spark-token-provider-kafka-0-10, '
    "kafka-clients and commons-pool2."
)

CONNECT_UNSUPPORTED = (
    "The job cannot run over Spark Connect, because it needs a driver of its own (SparkContext). Name the master of the cluster, "
    "such as spark://host:7077, instead of {master!r}."
)

LOG_CONFIG = Path(__file__).with_name("log4j2.properties")


def find_java() -> Path:
    """
    Return the path of the Java that Spark will start: the one in JAVA_HOME, or, if that is not set, the one on PATH.

    Raises:
        JavaMissing: there is no Java, or it is too old for Spark 4.
    """
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "")
    if not java.is_file():
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is no java on PATH"
        raise JavaMissing(f"Spark needs Java {OLDEST_JAVA} or newer, but {where}. {INSTALL_JAVA}")
    output = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    version = re.search(r'version "(\d+)', output)
    if version is None or int(version[1]) < OLDEST_JAVA:
        raise JavaMissing(f"Spark needs Java {OLDEST_JAVA} or newer, but {java} reports: {output.strip()}. {INSTALL_JAVA}")
    return java


def require_user() -> None:
    """
    Raise PipelineError if this process's user has no name, as in a container that runs with an arbitrary uid.

    Java looks up the user only in passwd, so no environment variable can name it.
    """
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        raise PipelineError(
            f"Spark needs a user with a name and a home, and uid {number} has no entry in passwd. {ADD_USER}"
        ) from None


def find_jar() -> str:
    """
    Return the path of the PostgreSQL JDBC driver. Raises PipelineError if it is not in the folder in which Debian installs it.
    """
    for path in JARS:
        if Path(path).is_file():
            return path
    raise PipelineError(f"The PostgreSQL JDBC driver is not at {' or '.join(JARS)}. {INSTALL_JAR}")


def find_kafka_jars(folder: str) -> list[str]:
    """Return the paths of the jars in a folder. Raises PipelineError if Spark's source for Kafka is not among them."""
    jars = sorted(str(path) for path in Path(folder).glob("*.jar"))
    if not any("spark-sql-kafka" in path for path in jars):
        raise PipelineError(f"There is no spark-sql-kafka-*.jar in {folder}. {INSTALL_KAFKA_JARS}")
    return jars


def build_session(config: PipelineConfig, *, name: str = "outbox", is_light: bool = False) -> SparkSession:
    """
    Return the Spark session of this process, and start it if necessary.

    Under spark-submit, the options of spark-submit are used instead of the configuration's master, memory and jars.

    Args:
        is_light: tune the JVM for a fast start, because it has little to do: Python workers read the files.

    Raises:
        JavaMissing: there is no suitable Java.
        PipelineError: pyspark, a jar or the user's name is missing, Spark does not start with this master, or the executors of a
            cluster cannot run the jobs.
    """
    try:
        import pyspark.sql  # imported only here, so that the error says what to install
    except ImportError as error:
        raise PipelineError('pyspark is missing: pip install "django-transactional-outbox[spark]"') from error
    if config.master.startswith("sc://"):
        raise PipelineError(CONNECT_UNSUPPORTED.format(master=config.master))
    find_java()
    require_user()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = pyspark.sql.SparkSession.builder.appName(name)
    kafka_package = ""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # not started by spark-submit
        builder = builder.master(config.master).config("spark.driver.memory", config.driver_memory)
        if config.master.startswith("local"):
            add_package_to_workers()
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # avoids a warning about the host name
            builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        sources = (config.outbox, *config.brokers)
        jars = [find_jar()] if any(source.is_postgres and source.reader == "jdbc" for source in sources) else []
        if config.kafka and config.kafka_jars:
            jars += find_kafka_jars(config.kafka_jars)
        elif config.kafka:
            kafka_package = KAFKA_PACKAGE.format(version=pyspark.__version__)
            builder = builder.config("spark.jars.packages", kafka_package)
        if jars:
            builder = builder.config("spark.jars", ",".join(jars))
        options = [
            "-Duser.timezone=UTC",
            f"-Dlog4j2.configurationFile={LOG_CONFIG}",
            METASPACE,
            *(FAST_START if is_light else ()),
        ]
        builder = builder.config("spark.driver.extraJavaOptions", " ".join(options))
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    try:
        session = builder.config("spark.sql.shuffle.partitions", config.shuffle_partitions).getOrCreate()
    except pyspark.errors.PySparkRuntimeError as error:
        if kafka_package:
            raise PipelineError(
                f"Spark could not start with {kafka_package}, which it downloads. {INSTALL_KAFKA_JARS}"
            ) from error
        raise PipelineError(
            f"Spark could not start with the master {config.master!r}. Spark's error is above, in the log."
        ) from error
    try:
        prepare_executors(session, config)
    except PipelineError:
        session.stop()
        raise
    return session


def add_package_to_workers() -> None:
    """Add this package to PYTHONPATH for Spark's Python workers, which do not inherit sys.path."""
    root = str(ROOT)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, path)])


METASPACE = "-XX:MetaspaceSize=256m"  # with the default of 21 MB, loading classes causes garbage collections
FAST_START = ("-XX:TieredStopAtLevel=1", "-XX:InitiatingHeapOccupancyPercent=80")  # compile faster, collect later

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # the default is INT96, which few other programs read
    "spark.sql.parquet.compression.codec": "lz4_raw",  # read twice as fast as with snappy
    "spark.sql.catalogImplementation": "in-memory",
}
