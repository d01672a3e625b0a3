"""Exit codes of jobs, where no Spark need start."""

from datetime import date

import pytest

from outbox.pipeline.spark import jobs
from outbox.pipeline.spark.archiver import ArchiveConfig
from outbox.pipeline.spark.config import PipelineConfig, Source

CONFIG = PipelineConfig(Source("postgresql://"))
CONFIGS = {
    "archive": ArchiveConfig(CONFIG, "/srv/lake", date(2001, 2, 3)).to_json(),
    "audit": CONFIG.to_json(),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a job whose work is what is given; return the exit code."""

    def run(job, work, *arguments):
        monkeypatch.setitem(jobs.JOBS, job, (work, "findings"))
        config = tmp_path / "config.json"
        config.write_text(CONFIGS[job])
        return jobs.main([job, "--config", str(config), *arguments])

    return run


def fails(*arguments, **more):
    raise RuntimeError("nobody foresaw this\nand the JVM says much more")


class TestAJob:
    @pytest.mark.parametrize("job", CONFIGS)
    def test_gives_no_answer_where_it_fails_in_a_way_that_nobody_foresaw(self, run, capsys, job):
        assert run(job, fails) == 2

        said = capsys.readouterr().err
        assert "Traceback (most recent call last)" in said
        assert said.splitlines()[-1].endswith(": RuntimeError: nobody foresaw this")

    def test_gives_no_answer_where_the_report_cannot_be_written(self, run, capsys, tmp_path):
        found = lambda *arguments: {"findings": []}  # noqa: E731

        assert run("audit", found, "--output", str(tmp_path / "nowhere" / "report.json")) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("Audit failed: FileNotFoundError:")
