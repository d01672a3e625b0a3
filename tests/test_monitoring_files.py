"""Alert rules and dashboard are files that users load: their metrics exist, and Prometheus takes them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from django.test import RequestFactory

from outbox.findings import Needs, rules
from outbox.monitoring import metrics

FOLDER = Path(__file__).parents[1] / "docs/monitoring"
RULES = Path(__file__).with_name("monitoring_rules.yml")

OF_OPENTELEMETRY = {"outbox_publish_to_sent_seconds_bucket", "outbox_publish_to_handled_seconds_bucket"}


@pytest.fixture
def known():
    """The metrics that there are."""
    text = metrics.view(RequestFactory().get("/metrics/")).content.decode()
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


def named(text):
    return set(re.findall(r"\boutbox_\w+", text))


@pytest.mark.django_db(databases=["default", "other"])
class TestMetrics:
    def test_of_the_dashboard_exist(self, known):
        panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
        asked = named(" ".join(target["expr"] for panel in panels for target in panel["targets"]))

        assert asked - known == OF_OPENTELEMETRY

    def test_of_the_alerts_exist(self, known):
        asked = named(" ".join(re.findall(r"expr: (.*)", (FOLDER / "alerts.yml").read_text()))) - {"outbox_pipeline"}

        assert asked == {"outbox_findings", "outbox_database_up"}
        assert asked <= known


def test_the_alerts_name_ids_that_exist():
    found = [number for ids in re.findall(r'id=~"([^"]+)"', (FOLDER / "alerts.yml").read_text()) for number in ids.split("|")]

    assert {*found} <= {number for one in rules(Needs.STATUS, Needs.DATABASE) for number in one.ids}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool, of Prometheus, is not installed")
def test_prometheus_alerts_as_it_should():
    done = subprocess.run(["promtool", "test", "rules", RULES], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
