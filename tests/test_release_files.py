"""The files by which a hosting site runs our checks and publishes releases: they call what is there."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CHECKS = set(re.findall(r"^check: (.*?) ##", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def commands(workflow: str) -> list[str]:
    return [step["run"] for job in read(workflow)["jobs"].values() for step in job["steps"] if "run" in step]


class TestTheWorkflowOfChanges:
    def test_runs_each_stage_that_a_change_must_pass_in_one_job(self):
        jobs = [stages.split() for stages in read(".github/workflows/ci.yml")["jobs"]["run"]["strategy"]["matrix"]["stages"]]
        stages = re.findall(r"^stage (\w+) \d", (ROOT / ".ci/run").read_text(), re.MULTILINE)

        assert commands(".github/workflows/ci.yml") == [".ci/run ${{ matrix.stages }}"]
        assert os.access(ROOT / ".ci/run", os.X_OK)
        assert {job[0] for job in jobs} == {"install"} == {stages[0]}
        assert sorted(name for job in jobs for name in job[1:]) == sorted(stages[1:])


class TestTheWorkflowOfReleases:
    def test_tests_what_it_builds_by_make_and_refuses_a_tag_of_another_version(self):
        test, build, compare = commands(".github/workflows/publish.yml")

        name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
        stages = set(re.findall(r"^stage (\w+) \d", (ROOT / ".ci/run").read_text(), re.MULTILINE))
        assert set(test.removeprefix(".ci/run ").split()) <= stages
        assert re.fullmatch(r"make (\S+) PY=python", build)[1] in TARGETS
        assert f"dist/{name.replace('-', '_')}-${{GITHUB_REF_NAME#v}}.tar.gz" in compare

    def test_stores_no_password(self):
        publish = read(".github/workflows/publish.yml")["jobs"]["publish"]

        assert publish["permissions"] == {"id-token": "write"}
        assert "secrets" not in (ROOT / ".github/workflows/publish.yml").read_text()


class TestPreCommit:
    def test_runs_a_part_of_make_check(self):
        hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]

        assert {hook["entry"].removeprefix("make --silent ") for hook in hooks} <= CHECKS
