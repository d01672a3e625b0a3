import pytest

from outbox.pipeline.archive import archive_config
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.archiver import ArchiveConfig


class TestAConfiguration:
    def test_is_read_as_it_was_written(self, with_archive, tmp_path):
        config = archive_config("default")
        (tmp_path / "config.json").write_text(config.to_json())

        assert ArchiveConfig.from_file(tmp_path / "config.json") == config

    def test_that_is_none_is_named(self, tmp_path):
        (tmp_path / "config.json").write_text('{"lake": "here"}')

        with pytest.raises(PipelineError, match=r"config\.json cannot be read: KeyError"):
            ArchiveConfig.from_file(tmp_path / "config.json")
