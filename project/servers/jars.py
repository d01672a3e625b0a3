"""Fetches the jars of a server that runs on Java, once. They are named by the pom beside the server's module."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

from project.servers.program import ServerError

INSTALL = "On Debian and Ubuntu: apt-get install default-jre-headless maven"


def java(server: str) -> str:
    """Return the path of java. Raises ServerError where there is none, which names the server that needs it."""
    return _program("java", server)


def are_programs_here() -> bool:
    """Return whether Java and Maven are on PATH."""
    return all(shutil.which(name) for name in ("java", "mvn"))


def fetch_jars(pom: Path, folder: Path) -> Path:
    """Copy the jars of a pom into a folder by Maven and return it; at once where it was done with the same pom before."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several who start nodes one fetches, and the others wait for it
        done = folder / "pom.xml"
        if not done.exists() or done.read_text() != pom.read_text():
            _fetch(pom, folder)
            shutil.copy(pom, done)
    return folder


def _fetch(pom: Path, folder: Path) -> None:
    maven = _program("mvn", f"What {pom.name} names")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder.resolve()}"]
    result = subprocess.run([maven, "-q", "-B", "-f", pom, *goal], capture_output=True, text=True)
    if result.returncode:
        raise ServerError(f"Maven could not fetch the jars of {pom.name}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")


def _program(name: str, user: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ServerError(f"{user} needs {name}, which is not on PATH. {INSTALL}")
    return path
