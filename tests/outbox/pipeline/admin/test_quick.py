import pytest
from django.urls import reverse

from outbox.models import Lane
from tests.outbox.pipeline.audit_runs.stories import relay
from tests.outbox.pipeline.quick_check.broken import BROKEN, play, run

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "admin:outbox_quick_check"


def look(client, window="1h"):
    return client.get(reverse(PAGE), {"window": window}).text


@pytest.fixture(autouse=True)
def _no_business_rows(settings):
    settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"AUDIT": {}}}


class TestThePage:
    def test_looks_at_nothing_before_it_is_asked(self, operator, asked):
        page = operator("view_auditrun").get(reverse(PAGE))

        assert "Check what was published in the last" in page.text
        assert not [query for query, _ in asked if "quick_" in str(query)]

    def test_says_what_it_found(self, operator):
        play(2)
        Lane.objects.update(last_seq=4)

        page = look(operator("view_auditrun"))

        assert "1 found" in page
        assert "numbers 3 to 4, at outbox" in page
        assert "2 places" in page

    def test_says_that_nothing_is_wrong(self, operator):
        play(1)

        assert "nothing is wrong" in look(operator("view_auditrun"))

    def test_says_that_nothing_was_proved_where_nothing_was_published(self, operator):
        page = look(operator("view_auditrun"))

        assert "nothing found, as far as was looked" in page
        assert "Nothing was proved." in page

    @pytest.mark.parametrize("what", ["a topic row that is gone", "headers that are not JSON", "times that never end"])
    def test_names_what_is_broken(self, operator, what):
        play()
        for statement in BROKEN[what][0]:
            run(statement)

        page = look(operator("view_auditrun"))

        assert "outbox-bad" in page
        assert "unknown topic" in page or "broken row" in page

    def test_says_why_it_has_no_answer(self, operator):
        relay(1)
        Lane.objects.update(last_seq=10**12)

        page = look(operator("view_auditrun"))

        assert "No answer" in page
        assert "gave out more than 100,000 numbers" in page

    def test_says_what_it_did_not_look_at(self, operator, settings):
        settings.OUTBOX = {
            **settings.OUTBOX,
            "PIPELINE": {"AUDIT": {"orders": {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced"}}},
        }

        page = look(operator("view_auditrun"))

        assert "nothing found, as far as was looked" in page
        assert "names no AT for them" in page

    def test_takes_a_wild_window_for_none(self, operator):
        assert "answer" not in operator("view_auditrun").get(reverse(PAGE), {"window": "' OR 1"}).context

    def test_is_offered_on_the_overview_to_whoever_may(self, operator):
        overview = reverse("admin:outbox_overview_changelist")

        assert reverse(PAGE) in operator("view_topic", "view_auditrun").get(overview).text
        assert reverse(PAGE) not in operator("view_topic", name="bob").get(overview).text
