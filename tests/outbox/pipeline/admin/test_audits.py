import re
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from outbox import database
from outbox.models import Batch, MessageState, State
from outbox.pipeline import runs, verdict
from outbox.pipeline.figures import latency_series
from outbox.pipeline.models import AuditFinding, AuditRun
from tests.factories import BatchFactory, message_id
from tests.outbox.pipeline.conftest import KEY
from tests.outbox.pipeline.stand_in import CLEAN, FINDING, REPORT

pytestmark = pytest.mark.django_db

RUNS = "admin:outbox_pipeline_auditrun_changelist"
LIST = "admin:outbox_pipeline_auditfinding_changelist"
ALL = ["view_auditrun", "view_auditfinding", "resend_auditfinding", "acknowledge_auditfinding"]
HOUR = timedelta(hours=1)


@pytest.fixture
def client(operator):
    return operator(*ALL)


@pytest.fixture
def run():
    """Store a run that found this."""

    def run(report=REPORT, **changes):
        made = runs.begin("default", asked_by="command", since=None, settle_seconds=300)
        runs.finish(made, {**report, **changes}, exit_code=0)
        return made

    return run


@pytest.fixture
def sent(orders):
    return BatchFactory(topic=orders, size=8, state=State.SENT, sent_at=datetime.now(UTC) - HOUR)


@pytest.fixture
def lost(run, sent):
    """Findings of messages that are lost at the broker, by their numbers."""

    def lost(*numbers, **changes):
        found = [{**FINDING, "source": "", "first": n, "last": n, "count": 1, "ids": [], **changes} for n in numbers]
        made = run(findings=found, as_of=datetime.now(UTC).isoformat())
        return list(AuditFinding.objects.filter(run=made).order_by("first_number"))

    return lost


def page_of(run):
    return reverse("admin:outbox_pipeline_auditrun_change", args=[run.pk])


def choose(client, action, rows, **more):
    chosen = {"action": action, "_selected_action": [str(row.pk) for row in rows], "index": "0"}
    return client.post(reverse(LIST), {**chosen, **more})


def confirm(client, page, **filled):
    fields = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page.text)
    data = {}
    for name, value in fields:
        data.setdefault(name, []).append(value)
    return client.post(reverse(LIST), {**data, "reason": "the disk was full", **filled}, follow=True)


def states(batch):
    return [MessageState.objects.get(id=one).state for one in batch.message_ids]


class TestRuns:
    def test_says_of_each_how_it_ended(self, client, run):
        run()
        run(CLEAN)
        runs.fail(runs.begin("default", asked_by="beat", since=None, settle_seconds=1), "No Java.\n\nlast words", 2)
        runs.begin("default", asked_by="command", since=None, settle_seconds=1)
        runs.skip("default", "An audit runs already.")

        page = client.get(reverse(RUNS)).text

        for said in ("1 finding", "no findings", "No Java.", "died", runs.DIED, "skipped", "An audit runs already."):
            assert said in page
        assert "last words" not in page

    def test_shows_what_one_found(self, client, run):
        made = run()

        page = client.get(page_of(made)).text

        for said in (
            "lost: 2 x topic",
            "assigned",
            '<th scope="row">points</th>',
            "sha256:abc",
            "1.0+abc",
            "consumption slower",
            "not signed",
        ):
            assert said.lower() in page.lower()
        assert f"{reverse(LIST)}?run={made.pk}" in page
        assert page.count("outbox-chart") == 3
        assert "style=" not in page

    def test_draws_when_the_lost_messages_were_published(self, client, run):
        hours = [datetime(2026, 11, 20, hour, tzinfo=UTC) for hour in (1, 1, 2)]
        made = run(findings=[{**FINDING, "ids": [str(message_id(hour)) for hour in hours] + ["orders/0/7"]}])

        context = client.get(page_of(made)).context

        assert [values for _, values in context["losses"]["rows"] if values != ["0"]] == [["1"], ["2"]]
        assert {stage["name"]: (stage["number"], stage["tone"]) for stage in context["stages"]} == {
            "Business": ("0", "good"),
            "Outbox": ("10", "good"),
            "Broker": ("8", "bad"),
            "Inbox": ("8", "good"),
        }

    def test_draws_each_latency_of_the_last_day_where_its_minute_is(self, run):
        newest, minutes = 1795100400, (0, 14, 15, 24 * 60 - 1)  # of the day, which ends with the newest
        seconds = [newest - 60 * (24 * 60 - 1 - minute) for minute in minutes]
        made = run(latency={"histograms": [["orders", "store", "", at, 100, 1] for at in seconds]})

        begin, end, [(_, shares)] = latency_series(database.raw("default"), made.pk, [("orders", "store", "")])

        assert [nth for nth, value in enumerate(shares[0.5]) if value is not None] == [0, 1, 95]
        assert (begin.timestamp(), end.timestamp()) == (seconds[0], newest + 60)

    def test_shows_why_one_failed(self, client):
        made = runs.begin("default", asked_by="beat", since=None, settle_seconds=1)
        runs.fail(made, "No Java.\n\n<b>last words</b>", 2)

        page = client.get(page_of(made)).text

        assert "&lt;b&gt;last words&lt;/b&gt;" in page
        assert "exit code 2" in page

    def test_escapes_what_a_finding_says(self, client, run):
        made = run(findings=[{**FINDING, "text": "<script>alert(1)</script>", "topic": "<i>"}])

        assert "<script>alert" not in client.get(page_of(made)).text
        assert "<script>alert" not in client.get(reverse(LIST)).text

    def test_gives_its_verdict_to_be_verified(self, client, run, monkeypatch):
        monkeypatch.setenv("OUTBOX_AUDIT_KEY", KEY)
        made = run()

        answer = client.get(reverse("admin:outbox_pipeline_auditrun_verdict", args=[made.pk]))

        assert answer.headers["Content-Disposition"] == f'attachment; filename="audit-{made.pk}-verdict.json"'
        assert verdict.verify(answer.text)["run"] == made.pk

    def test_gives_no_verdict_to_others_and_none_where_there_is_none(self, operator, run):
        failed = runs.begin("default", asked_by="beat", since=None, settle_seconds=1)

        url = reverse("admin:outbox_pipeline_auditrun_verdict", args=[failed.pk])

        assert operator("view_auditrun").get(url).status_code == 404
        assert operator("view_topic", name="bob").get(url).status_code == 403

    def test_gives_its_page_as_one_file_that_loads_nothing(self, client, operator, run):
        made = run(findings=[{**FINDING, "text": "<script>alert(1)</script>"}])
        url = reverse("admin:outbox_pipeline_auditrun_report", args=[made.pk])

        answer = client.get(url)

        finding = reverse("admin:outbox_pipeline_auditfinding_change", args=[AuditFinding.objects.get().pk])
        assert answer.headers["Content-Disposition"] == f'attachment; filename="audit-{made.pk}.html"'
        assert url in client.get(page_of(made)).text
        assert '<base href="http://testserver/">' in answer.text
        assert f'<a href="{finding}"><bdi>&lt;script&gt;alert(1)' in answer.text
        assert "<script" not in answer.text
        assert not re.search(r"<link|\bsrc=|@import|url\(", answer.text)
        assert finding not in operator("view_auditrun", name="eve").get(url).text
        assert operator("view_topic", name="bob").get(url).status_code == 403

    def test_links_no_findings_for_whoever_may_not_see_them(self, operator, run):
        page = operator("view_auditrun").get(page_of(run())).text

        assert reverse(LIST) not in page


class TestFindings:
    def test_can_be_told_apart(self, client, lost, run):
        first, second = lost(2, 3)
        AuditFinding.objects.filter(pk=second.pk).update(acknowledged_at=datetime.now(UTC))
        other = run(findings=[{**FINDING, "kind": "orphan", "stage": "inbox", "topic": "shipments", "text": "the orphan"}])

        def found(**filters):
            rows = client.get(reverse(LIST), filters).context["cl"].result_list
            return {row.pk for row in rows}

        orphan = AuditFinding.objects.get(run=other).pk
        assert found() == {first.pk, second.pk, orphan}
        assert found(state="open") == {first.pk, orphan}
        assert found(state="acknowledged") == {second.pk}
        assert found(run=other.pk) == found(kind="orphan") == found(stage="inbox") == found(topic="shipments") == {orphan}
        assert found(run="x") == found(run="9" * 30) == set()

    def test_is_found_by_the_state_that_its_badge_names(self, client, lost):
        resent, closed, both = lost(2, 3, 4)
        AuditFinding.objects.filter(pk__in=[resent.pk, both.pk]).update(resent_at=datetime.now(UTC), resent_count=1)
        AuditFinding.objects.filter(pk__in=[closed.pk, both.pk]).update(acknowledged_at=datetime.now(UTC))

        pages = {state: client.get(reverse(LIST), {"state": state}) for state in ("open", "sent", "acknowledged", "xyz")}

        listed = {state: {row.pk for row in page.context["cl"].result_list} for state, page in pages.items()}
        assert listed == {"open": set(), "sent": {resent.pk, both.pk}, "acknowledged": {closed.pk}, "xyz": set()}

    def test_shows_one_with_what_can_be_done(self, client, lost):
        (one,) = lost(2)

        page = client.get(reverse("admin:outbox_pipeline_auditfinding_change", args=[one.pk])).text

        assert "Can be sent again" in page

    @pytest.mark.parametrize("wild", ["x", "0", "9" * 30])
    def test_has_none_of_a_wild_number(self, client, wild):
        assert client.get(reverse("admin:outbox_pipeline_auditfinding_change", args=[wild])).status_code == 302


class TestSendingAgain:
    def test_asks_how_many_and_names_what_cannot_be_sent(self, client, lost, sent):
        rows = lost(2, 9)

        page = choose(client, "resend", rows)

        assert "<strong>1</strong> is affected" in page.text
        assert "Not sent: 1. The outbox does not have it" in page.text
        assert states(sent) == ["sent"] * 8

    def test_sends_exactly_the_lost_ones_with_a_reason(self, client, lost, sent):
        rows = lost(2, 3)

        page = confirm(client, choose(client, "resend", rows))

        assert "Messages to send again: 2." in page.text
        assert states(sent) == ["sent", "released", "released", *["sent"] * 5]
        rows[0].refresh_from_db()
        assert (rows[0].resent_count, rows[0].resent_by) == (1, "ada")
        assert {entry.get_change_message() for entry in LogEntry.objects.all()} == {"1 sent again. Reason: the disk was full"}
        assert LogEntry.objects.count() == 2

    def test_does_nothing_twice_by_a_stale_form(self, client, operator, lost, sent):
        rows = lost(2)
        other = operator(*ALL, name="bob")
        stale = choose(other, "resend", rows)
        confirm(client, choose(client, "resend", rows))

        page = confirm(other, stale)

        assert "They were already sent again." in page.text
        assert Batch.objects.count() == 2
        assert LogEntry.objects.count() == 1

    def test_leaves_what_a_later_audit_found(self, client, lost, sent):
        page = choose(client, "resend", lost(2), select_across="1")
        lost(3)

        confirm(client, page)

        assert list(AuditFinding.objects.order_by("id").values_list("resent_count", flat=True)) == [1, 0]

    def test_needs_a_reason(self, client, lost, sent):
        page = confirm(client, choose(client, "resend", lost(2)), reason="")

        assert "This field is required" in page.text
        assert states(sent) == ["sent"] * 8

    def test_says_why_none_can_be_sent(self, client, lost):
        page = client.post(reverse(LIST), {"action": "resend", "_selected_action": [lost(2, kind="orphan")[0].pk]}, follow=True)

        assert "Not sent: 1. No message of this finding is lost." in page.text

    def test_is_for_those_who_may(self, operator, lost, sent):
        reader = operator("view_auditfinding", "acknowledge_auditfinding", name="eve")
        rows = lost(2)

        answer = choose(reader, "resend", rows)

        assert "Send lost messages again" not in reader.get(reverse(LIST)).text
        assert answer.status_code == 302
        assert states(sent) == ["sent"] * 8


class TestAcknowledging:
    def test_notes_who_and_why(self, client, lost):
        (row,) = lost(2)

        confirm(client, choose(client, "acknowledge", [row]), reason="restored from a <b>backup</b>")

        row.refresh_from_db()
        assert (row.acknowledged_by, row.note) == ("ada", "restored from a <b>backup</b>")
        assert LogEntry.objects.get().get_change_message() == "Acknowledged. Note: restored from a <b>backup</b>"
        page = client.get(reverse("admin:outbox_pipeline_auditfinding_change", args=[row.pk])).text
        assert "restored from a &lt;b&gt;backup&lt;/b&gt;" in page

    def test_leaves_what_a_later_audit_found(self, client, lost):
        (row,) = lost(2)
        page = choose(client, "acknowledge", [row], select_across="1")
        (later,) = lost(3)

        answer = confirm(client, page)

        later.refresh_from_db()
        row.refresh_from_db()
        assert "Acknowledged: 1." in answer.text
        assert (row.acknowledged_by, later.acknowledged_at) == ("ada", None)

    def test_leaves_a_note_that_is_there(self, client, operator, lost):
        (row,) = lost(2)
        other = operator(*ALL, name="bob")
        stale = choose(other, "acknowledge", [row])
        confirm(client, choose(client, "acknowledge", [row]), reason="mine")

        confirm(other, stale, reason="theirs")

        row.refresh_from_db()
        assert row.note == "mine"
        assert LogEntry.objects.count() == 1

    def test_is_for_those_who_may(self, operator, lost):
        (row,) = lost(2)

        answer = choose(operator("view_auditfinding", "resend_auditfinding", name="eve"), "acknowledge", [row])

        row.refresh_from_db()
        assert (answer.status_code, row.acknowledged_at) == (302, None)

    def test_asks_nothing_of_what_is_closed(self, client, lost):
        (row,) = lost(2)
        confirm(client, choose(client, "acknowledge", [row]))

        assert choose(client, "acknowledge", [row]).status_code == 302

    def test_by_somebody_faster_is_left_as_it_is(self, client, lost):
        (row,) = lost(2)
        page = choose(client, "acknowledge", [row])
        AuditFinding.objects.update(acknowledged_at=datetime.now(UTC), acknowledged_by="bob", note="theirs")

        confirm(client, page)

        row.refresh_from_db()
        assert (row.acknowledged_by, row.note) == ("bob", "theirs")


class TestAPage:
    def test_asks_a_bounded_number_of_questions(self, client, run, asked):
        made = run(
            findings=[{**FINDING, "ids": [str(message_id())]} for _ in range(60)],
            latency={"histograms": [[f"topic-{n}", "store", "", 1795100400 + n * 60, 9, 1] for n in range(40)]},
        )
        asked.clear()

        page = client.get(page_of(made))

        assert page.status_code == 200
        assert page.text.count("outbox-chart") == 8
        assert "10 more" in page.text
        assert len(asked) < 30

    def test_of_a_run_that_is_gone_leads_home(self, client):
        assert client.get(reverse("admin:outbox_pipeline_auditrun_change", args=[99])).status_code == 302
        assert AuditRun.objects.count() == 0
