"""Small projects of Django's, as its `startproject` and our pages make them, with one mistake or several."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg
from django.db import connections

from tests.database_url import url_of
from tests.journeys import readme
from tests.journeys.newcomer.play import BEGIN
from tests.journeys.readme import ROOT
from tests.quotes import python_blocks

SETTINGS = "mysite/settings.py"
NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"  # for what is to be said without a database
SECONDS = 60
ENVIRONMENT = dict(os.environ)  # read here, since pytest changes it for each test, while threads play mistakes

CELERY_APP = """
import os
from celery import Celery
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
app = Celery("mysite")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""

# Of the README's example, which has no Celery.
NO_CELERY = 'OUTBOX["CELERY_WAKEUP"] = False\n'

Command = tuple[str, ...]


@dataclass(frozen=True)
class Play:
    """
    A project, and what its commands say.

    Args:
        says: what each command says about which mistakes: command -> mistake -> sentence.
        edits: (file, old, new); a text in the place of an old one, or at the end of the file if that is "".
        quiet: commands that run before these and find nothing: nothing could be known earlier.
        page: the page with the project's files: README.md, or that of Celery's tasks.
        database: "": none can be reached; "migrated"; "empty".
    """

    says: Mapping[Command, Mapping[str, str]]
    edits: Sequence[tuple[str, str, str]] = ()
    quiet: Sequence[Command] = ()
    page: str = "README.md"
    database: str = ""
    other_database: bool = False

    @property
    def commands(self) -> list[Command]:
        return [*self.quiet, *self.says]


@dataclass
class Stage:
    """Plays projects, in folders and databases of their own."""

    folder: Path
    _server: psycopg.Connection = field(repr=False)
    _prefix: str = f"newcomer_{os.getpid()}"
    _numbers: Iterator[int] = field(default_factory=count)  # plays run side by side
    _made: list[str] = field(default_factory=list)

    def play(self, play: Play) -> list[str]:
        """Return the output of each command."""
        project = shutil.copytree(self.folder / play.page, self.folder / f"play_{next(self._numbers)}")
        for file, old, new in play.edits:
            path = project / file
            text = path.read_text() if path.exists() else ""
            assert old in text, f"{old!r} is not in {file}"
            path.write_text(text.replace(old, new) if old else f"{text}\n{new}\n")
        databases = {"DATABASE_URL": self.database(play.database)}
        if play.other_database:
            databases["OTHER_DATABASE_URL"] = self.database("migrated")
        return _run(project, play.commands, databases)

    def database(self, kind: str) -> str:
        """Return the URL of a new database, or of none."""
        if not kind:
            return NOWHERE
        name = f"{self._prefix}_{next(self._numbers)}"
        self._made.append(name)
        template = "template0" if kind == "empty" else f"{self._prefix}_migrated"
        self._server.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self._url(name)

    def set_up(self) -> None:
        """Make the projects of both pages, and a database that the README's example has migrated."""
        shop, tasks = self.folder / "README.md", self.folder / "celery-tasks.md"
        for project in (shop, tasks):
            project.mkdir()
            _python(project, "-m", "django", "startproject", "mysite", ".")
            _python(project, "manage.py", "startapp", "shop")
        readme.write(shop)
        _append(shop / SETTINGS, NO_CELERY + OTHER_DATABASE)
        settings, task, *_ = python_blocks("how-to/celery-tasks.md")
        _append(
            tasks / SETTINGS,
            f'{readme.DATABASES}{settings}INSTALLED_APPS += ["shop"]\nCELERY_BROKER_URL = "redis://127.0.0.1:1/0"\n',
        )
        (tasks / "shop/tasks.py").write_text(task)
        (tasks / "mysite/celery.py").write_text(CELERY_APP)
        _append(tasks / "mysite/__init__.py", "from mysite.celery import app")
        name = f"{self._prefix}_migrated"
        self._server.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        _run(shop, [("makemigrations", "shop", "-v0"), ("migrate", "-v0")], {"DATABASE_URL": self._url(name)})
        self._made.append(name)

    def close(self) -> None:
        for name in self._made:
            self._server.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _url(self, name: str) -> str:
        return url_of({**connections["default"].settings_dict, "NAME": name})


OTHER_DATABASE = """
if "OTHER_DATABASE_URL" in os.environ:
    DATABASES["other"] = dj_database_url.parse(os.environ["OTHER_DATABASE_URL"])
"""


@contextmanager
def open_stage(folder: Path) -> Iterator[Stage]:
    with psycopg.connect(url_of({**connections["default"].settings_dict, "NAME": "postgres"}), autocommit=True) as server:
        stage = Stage(folder, server)
        try:
            stage.set_up()
            yield stage
        finally:
            stage.close()


def _append(file: Path, text: str) -> None:
    with file.open("a") as end:
        end.write(f"\n{text}\n")


def _run(project: Path, commands: Sequence[Command], variables: Mapping[str, str]) -> list[str]:
    given = json.dumps([list(command) for command in commands])
    _, *outputs = _python(project, "-m", "tests.journeys.newcomer.play", given, **variables).split(BEGIN)
    assert len(outputs) == len(commands), outputs
    return outputs


def _python(project: Path, *arguments: str, **variables: str) -> str:
    """Run Python in a project; return all its output."""
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{project}{os.pathsep}{ROOT}", **variables}
    environment["DJANGO_SETTINGS_MODULE"] = "mysite.settings"
    if "startproject" in arguments:
        del environment["DJANGO_SETTINGS_MODULE"]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
