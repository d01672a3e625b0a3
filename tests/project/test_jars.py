"""Where the jars of a server come from."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from project.servers.jars import fetch_jars

MAVEN = """#!/bin/sh
echo run >> "$0.runs"
sleep 0.3  # time for others to look whether it was done
"""


class TestFetchJars:
    def test_has_maven_run_once_for_all_who_ask_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        maven = tmp_path / "mvn"
        maven.write_text(MAVEN)
        maven.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

        pom = tmp_path / "a.xml"
        pom.write_text("<project/>")

        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(fetch_jars, [pom] * 3, [tmp_path / "lib"] * 3))

        assert found == [tmp_path / "lib"] * 3
        assert (tmp_path / "mvn.runs").read_text() == "run\n"
