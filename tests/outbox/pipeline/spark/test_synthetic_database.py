"""A made-up history in the tables of a database, audited from there."""

import pytest
from django.db import connection

from benchmarks.synthetic.database import write_database
from benchmarks.synthetic.plan import Plan
from outbox.models import Lane
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.audit import audit
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.history import open_history
from outbox.pipeline.spark.postgres import copy_history
from tests.database_url import url_of

PLAN = Plan(6_000, lost=24, duplicated=6, orphans=6, topics=2, lanes=2, groups=2, seed=5)


@pytest.fixture
def url(transactional_db):
    return url_of(connection.settings_dict)


class TestADatabase:
    def test_has_exactly_the_faults_it_says(self, spark, url, tmp_path):
        truth = write_database(spark, PLAN, url)

        config = PipelineConfig.from_json(truth["config"])
        copy_history(spark, config, str(tmp_path))
        report = audit(spark, config, open_history(spark, str(tmp_path)))
        found = [one.as_dict() for one in report.findings]

        def shape(one):
            return one["kind"], one["stage"], one["topic"], one["lane"], one["group"], one["first"], one["last"], one["count"]

        assert sorted(map(shape, found)) == sorted(map(shape, truth["findings"]))
        assert {one["kind"] for one in found} == {"lost", "duplicated", "orphan"}
        assert sum(counts["assigned"] for counts in report.counts.values()) == PLAN.messages

    def test_is_refused_where_it_has_rows(self, spark, url):
        Lane.objects.create(topic_id=1, lane=1, last_seq=1)

        with pytest.raises(PipelineError, match=r"The table outbox_lane has rows\. .* nothing was written"):
            write_database(spark, PLAN, url)

    def test_is_refused_where_it_has_no_tables(self, spark, url):
        with pytest.raises(PipelineError, match=r"no table outbox_message: run manage\.py migrate"):
            write_database(spark, PLAN, f"{url}&options=-csearch_path%3Dpg_catalog")

    def test_is_refused_where_nobody_answers(self, spark):
        with pytest.raises(PipelineError, match="The database cannot be filled"):
            write_database(spark, PLAN, "postgresql://nobody@127.0.0.1:1/nothing")
