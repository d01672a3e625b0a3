import pytest

from outbox import findings
from outbox.findings import Finding, Needs, Rule, unreachable_broker
from outbox.monitoring.doctor import check

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def examined(monkeypatch):
    """Let the doctor ask these rules only; return id, subject and text of its findings, without those about the configuration."""

    def examined(*finds):
        monkeypatch.setattr(findings, "RULES", [Rule((f"outbox.{find.__name__}",), Needs.SERVERS, find) for find in finds])
        return [(one.id, one.obj, one.text) for one in check() if one.obj != "configuration"]

    return examined


def wakeups():
    yield Finding("outbox.no_worker", "queue 'outbox'", "4 tasks wait.")
    yield Finding("outbox.no_worker", "queue 'outbox'", "A worker discards them.")


class TestRules:
    def test_that_fail_are_named_beside_what_others_find(self, examined):
        def endless():
            raise RuntimeError("no end")

        assert examined(endless, wakeups) == [
            ("outbox.rule_fails", "rule outbox.endless", "It fails when it is called. no end."),
            ("outbox.no_worker", "queue 'outbox'", "4 tasks wait."),
            ("outbox.no_worker", "queue 'outbox'", "A worker discards them."),
        ]

    def test_whose_finding_stops_all_work_make_it_an_error(self, examined):
        def brokers():
            yield unreachable_broker("default", "It cannot be reached.", "")

        examined(brokers)

        assert [finding.level_name for finding in check() if finding.id == "outbox.broker_away"] == ["error"]

    def test_do_not_tell_what_an_earlier_one_has_told(self, examined):
        def processes():
            yield Finding("outbox.no_worker", "queue 'outbox'", "No worker takes wakeups.")
            yield Finding("outbox.no_worker", "queue 'other'", "No worker takes wakeups.")

        assert examined(wakeups, processes)[2:] == [("outbox.no_worker", "queue 'other'", "No worker takes wakeups.")]
