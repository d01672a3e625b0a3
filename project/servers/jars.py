"""Download the jars of a server that runs on Java, once. The pom.xml beside the server's module lists them."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

from project.servers.program import ServerError

INSTALL = "On Debian and Ubuntu: apt-get install default-jre-headless maven"


def java(server: str) -> str:
    """
    Return the path of java.

    Raises:
        ServerError: there is none; the text names the server that needs it.
    """
    return _program("java", server)


def are_programs_here() -> bool:
    """Return whether Java and Maven are on PATH."""
    return all(shutil.which(name) for name in ("java", "mvn"))


def fetch_jars(pom: Path, folder: Path) -> Path:
    """Copy the jars of a pom into a folder with Maven, unless it has them already, and return the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if several processes start nodes, one fetches, and the others wait
        fetched_pom = folder / "pom.xml"
        if not fetched_pom.exists() or fetched_pom.read_text() != pom.read_text():
            _fetch(pom, folder)
            shutil.copy(pom, fetched_pom)
    return folder


def _fetch(pom: Path, folder: Path) -> None:
    maven = _program("mvn", f"Fetching the jars of {pom.name}")
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
