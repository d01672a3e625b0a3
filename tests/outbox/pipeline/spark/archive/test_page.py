"""docs/how-to/archive.md, run as it stands."""

from outbox.pipeline import conf
from tests.quotes import python_blocks


class TestThePage:
    def test_shows_what_works(self, archive, lake, ids, settings):
        setting, reading = python_blocks("how-to/archive.md")
        names = {"INSTALLED_APPS": []}

        exec(setting, names)  # noqa: S102
        settings.OUTBOX = names["OUTBOX"]
        assert str(conf.settings().archive.path) in reading

        archive()
        exec(reading.replace("/srv/lake/default", str(lake.root)).replace("2026-11-", "2001-02-"), names)  # noqa: S102
        assert sorted(names["messages"]["message_id"].to_pylist()) == ids
