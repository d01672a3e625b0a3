"""
Start Spark for a job: the session of its driver, and the executors of a cluster.

    settings -> build_session -> driver's JVM -- a zip of this package --> executors -- their faults --> one error"""

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
    Measures the steps of a job by the wall clock, one after the other.

    Args:
        log: called with the name of each step, and by the step with lines about its progress.
    """

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self.log = log
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a step: the block."""
        self.log(name)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 2)


PACKAGE = "django-transactional-outbox"


def code_version() -> str:
    """Return a version such as `1.0+3f2a9c0d1b7e`, or `unknown+…` if the package was copied and not installed."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = "unknown"
    return f"{version}+{source_digest()}"


def source_digest() -> str:
    """Return the digest of the pipeline's source files, in a folder or a zip."""
    whole = hashlib.sha256()
    for name, content in sorted(_sources(files("outbox.pipeline.spark"), "")):
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return whole.hexdigest()[:12]


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, name)
        elif name.endswith(".py"):
            yield name, entry.read_bytes()


ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("__init__.py", "database/__init__.py", "database/locks.py", "pipeline/__init__.py", "pipeline/spark/**/*.py")
MODULES = ("numpy", "pandas", "pyarrow")

NO_PYTHON = (
    "The executors cannot run Python {version} as {python!r}: {reason}. Set PYSPARK_PYTHON to a Python of this minor version at "
    "the executors."
)
UNFIT = "The executors cannot run the job. {faults}. Set PYSPARK_PYTHON to a Python at the executors that has what is missing."


def prepare_executors(spark: SparkSession, config: PipelineConfig) -> None:
    """
    Send this package to the executors, and check their Python by one small job. Executors of a local master need neither.

    Raises:
        PipelineError: an executor has another minor version of Python, lacks a package, or uses another release of this one.
    """
    context = spark.sparkContext
    if context.master.startswith("local"):
        return
    context.addPyFile(str(_zipped()))
    is_psycopg_needed = any(source.is_postgres and source.reader == "python" for source in (config.outbox, *config.brokers))
    modules = (*MODULES, "psycopg") if is_psycopg_needed else MODULES
    many = context.defaultParallelism
    try:
        faults = context.parallelize(range(many), many).mapPartitions(partial(find_faults, modules, source_digest())).collect()
    except Exception as error:  # of py4j: the worker did not start, or could not import this module
        named = re.search(r"\w*(?:Error|IOException): (.+)", str(error))
        reason = (named[1] if named else str(error)).rstrip(".")
        about = {"version": platform.python_version(), "python": context.pythonExec, "reason": reason}
        raise PipelineError(NO_PYTHON.format(**about)) from error
    if faults:
        raise PipelineError(UNFIT.format(faults="; ".join(sorted(set(faults)))))


def find_faults(modules: Sequence[str], digest: str, _: Iterable[int]) -> Iterator[str]:
    """Yield what this process lacks to be an executor of a driver whose code has this digest."""
    here = f"{platform.node()}, {sys.executable}"
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            yield f"{here}: {error}"
    if source_digest() != digest:
        yield f"{here}: {__file__} is of another release of django-transactional-outbox"


def _zipped() -> Path:
    """Write the modules that executors import to a zip, which is deleted at exit: executors that start later fetch it, too."""
    folder = tempfile.mkdtemp(prefix="outbox-executors-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, f"outbox-{source_digest()}.zip")
    with ZipFile(path, "w") as package:
        for pattern in SHIPPED:
            for file in sorted((ROOT / "outbox").glob(pattern)):
                package.write(file, file.relative_to(ROOT))
    return path


OLDEST_JAVA = 17
JARS = ("/usr/share/java/postgresql.jar", "/usr/share/java/postgresql-jdbc4.jar")
INSTALL_JAVA = "On Debian and Ubuntu: apt-get install default-jre-headless"
ADD_USER = (
    'Add one when the container starts: echo "outbox:x:$(id -u):$(id -g)::/tmp:/sbin/nologin" >> /etc/passwd. Where that file '
    "cannot be written, install libnss-wrapper, and set LD_PRELOAD=libnss_wrapper.so, NSS_WRAPPER_PASSWD and NSS_WRAPPER_GROUP."
)
INSTALL_JAR = 'On Debian and Ubuntu: apt-get install libpostgresql-jdbc-java. Or read with reader="python", which needs none.'
KAFKA_PACKAGE = "org.apache.spark:spark-sql-kafka-0-10_2.13:{version}"
INSTALL_KAFKA_JARS = (
    'Set OUTBOX["PIPELINE"]["KAFKA_JARS"] to a folder with the jars of spark-sql-kafka-0-10, spark-token-provider-kafka-0-10, '
    "kafka-clients and commons-pool2."
)

NO_CONNECT = (
    "The job cannot run over Spark Connect, because it is a driver itself (SparkContext). Name the master of the cluster, such "
    "as spark://host:7077, instead of {master!r}."
)

LOGGING = Path(__file__).with_name("log4j2.properties")


def find_java() -> Path:
    """
    Return the path of the Java that Spark will start: from JAVA_HOME, or else on PATH.

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
    Raise PipelineError where this process's user has no name, as in a container that runs with any uid.

    Java looks into passwd alone, so no variable of the environment can name the user.
    """
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        raise PipelineError(
            f"Spark needs a user with a name and a home, and uid {number} has no entry in passwd. {ADD_USER}"
        ) from None


def find_jar() -> str:
    """Return the path of the PostgreSQL JDBC driver. Raises PipelineError if it is not where Debian installs it."""
    for path in JARS:
        if Path(path).is_file():
            return path
    raise PipelineError(f"The PostgreSQL JDBC driver is not at {' or '.join(JARS)}. {INSTALL_JAR}")


def find_kafka_jars(folder: str) -> list[str]:
    """Return the paths of the jars in a folder. Raises PipelineError where Spark's source for Kafka is not among them."""
    jars = sorted(str(path) for path in Path(folder).glob("*.jar"))
    if not any("spark-sql-kafka" in path for path in jars):
        raise PipelineError(f"There is no spark-sql-kafka-*.jar in {folder}. {INSTALL_KAFKA_JARS}")
    return jars


def build_session(config: PipelineConfig, *, name: str = "outbox", is_light: bool = False) -> SparkSession:
    """
    Return the Spark session of this process; start it if necessary.

    Under spark-submit, its master and memory are used instead of those in the configuration.

    Args:
        is_light: the JVM has little to do, because workers read the files; so optimize for a fast start.

    Raises:
        JavaMissing: there is no suitable Java.
        PipelineError: pyspark, a jar or the user's name is missing, Spark does not start with this master, or the executors of a
            cluster cannot run the jobs.
    """
    try:
        import pyspark.sql  # here, to report what to install
    except ImportError as error:
        raise PipelineError('pyspark is missing: pip install "django-transactional-outbox[spark]"') from error
    if config.master.startswith("sc://"):
        raise PipelineError(NO_CONNECT.format(master=config.master))
    find_java()
    require_user()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = pyspark.sql.SparkSession.builder.appName(name)
    package = ""
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
            package = KAFKA_PACKAGE.format(version=pyspark.__version__)
            builder = builder.config("spark.jars.packages", package)
        if jars:
            builder = builder.config("spark.jars", ",".join(jars))
        options = ["-Duser.timezone=UTC", f"-Dlog4j2.configurationFile={LOGGING}", METASPACE, *(FAST_START if is_light else ())]
        builder = builder.config("spark.driver.extraJavaOptions", " ".join(options))
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    try:
        session = builder.config("spark.sql.shuffle.partitions", config.shuffle_partitions).getOrCreate()
    except pyspark.errors.PySparkRuntimeError as error:
        if package:
            raise PipelineError(f"Spark could not start with {package}, which it downloads. {INSTALL_KAFKA_JARS}") from error
        raise PipelineError(
            f"Spark could not start with the master {config.master!r}. Its own reason is above, in the log."
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


METASPACE = "-XX:MetaspaceSize=256m"  # the default of 21 MB causes garbage collections at the start
FAST_START = ("-XX:TieredStopAtLevel=1", "-XX:InitiatingHeapOccupancyPercent=80")  # few collections in a short life

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # the default is INT96, which few other programs read
    "spark.sql.parquet.compression.codec": "lz4_raw",  # read twice as fast as snappy
    "spark.sql.catalogImplementation": "in-memory",
}
