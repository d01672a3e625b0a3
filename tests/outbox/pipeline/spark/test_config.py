"""The configurations of jobs."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from outbox.pipeline.archive import archive_config
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.archiver import ArchiveConfig
from outbox.pipeline.spark.config import Archived, AuditedGroup, Business, PipelineConfig, Source

CONFIG = PipelineConfig(
    outbox=Source("postgresql://shop@db/shop", reader="python"),
    brokers=[Source("postgresql://shop@db/broker")],
    business=[Business("orders", "orders", "shop.order", where="total > 0")],
    groups=[AuditedGroup("cart", ["orders", "bills"])],
    since=datetime(2026, 1, 2, 3, tzinfo=UTC),
    archived=Archived("/srv/lake", datetime(2026, 1, 1, tzinfo=UTC), 604800.0, datetime(2026, 1, 2, tzinfo=UTC)),
)


class TestAConfiguration:
    def test_travels_as_json(self):
        assert PipelineConfig.from_json(CONFIG.to_json()) == CONFIG
        never_pruned = replace(CONFIG, archived=Archived("/srv/lake", CONFIG.archived.born, 604800.0, None))
        assert PipelineConfig.from_json(never_pruned.to_json()) == never_pruned

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "JSONDecodeError"),
            ("[]", "cannot be read"),
            ("{}", "KeyError: 'outbox'"),
            ('{"outbox": {"url": "x"}, "settle": 1}', "unexpected keyword argument 'settle'"),
        ],
    )
    def test_says_what_cannot_be_read(self, text, said):
        with pytest.raises(PipelineError, match=said):
            PipelineConfig.from_json(text)

    def test_insists_on_a_fetch_size(self):
        with pytest.raises(PipelineError, match="outside of the common snapshot"):
            replace(CONFIG.outbox, fetch_rows=0)

    def test_knows_two_readers(self):
        with pytest.raises(PipelineError, match="not 'odbc'"):
            Source("postgresql://", reader="odbc")


class TestTheConfigurationOfAnArchive:
    def test_is_read_as_it_was_written(self, with_archive, tmp_path):
        config = archive_config("default")
        (tmp_path / "config.json").write_text(config.to_json())

        assert ArchiveConfig.from_file(tmp_path / "config.json") == config

    def test_that_is_none_is_named(self, tmp_path):
        (tmp_path / "config.json").write_text('{"lake": "here"}')

        with pytest.raises(PipelineError, match=r"config\.json cannot be read: KeyError"):
            ArchiveConfig.from_file(tmp_path / "config.json")
