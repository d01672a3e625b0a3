from dataclasses import replace

import psycopg
import pytest

from tests.browser import audits
from tests.waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

# The message of a half that a check-back ended: its relay was killed after the decision.
SAVED = "SELECT message_id FROM outbox_check_back WHERE answer = 'COMMIT' AND asked_by = 'endpoint' ORDER BY id LIMIT 1"
ORDER = "SELECT id FROM shop_order WHERE invoice = '536365'"
FAILING = "SELECT message_id FROM outbox_failed_delivery WHERE traceback <> '' ORDER BY id DESC LIMIT 1"
DEAD = "SELECT coalesce(sum(cardinality(message_ids) - cardinality(split)), 0) FROM outbox_batch WHERE state = 4"

PAGES = {
    "overview": "/admin/outbox/overview/",
    "messages": "/admin/outbox/messagerow/",
    "dead-messages": "/admin/outbox/deadmessage/",
    "deferred-messages": "/admin/outbox/deferred/",
    "gaps": "/admin/outbox/gap/",
    "half-messages": "/admin/outbox_embedded/embeddedhalf/",
    "check-backs": "/admin/outbox/checkback/",
    "inbox": "/admin/outbox/inboxrow/",
    "topics": "/admin/outbox/topic/",
    "audits": "/admin/outbox_pipeline/auditrun/",
    "findings": "/admin/outbox_pipeline/auditfinding/",
    "catalogue": "/admin/outbox/overview/catalogue/",
    "archived-days": "/admin/outbox_pipeline/archivedday/",
}

# What has more in it than fits, and is scrolled.
CUT_OFF = """() => [...document.querySelectorAll('#content, #content *')].filter(one =>
    (one.id === 'content' || ['auto', 'scroll'].includes(getComputedStyle(one).overflowX)) && one.clientWidth > 0
    && one.scrollWidth > one.clientWidth + 1
).map(one => `${one.tagName}.${one.className}: ${one.scrollWidth} > ${one.clientWidth}`)"""


# Two messages get lost after the group has handled them: their inbox rows go, and a search for gaps finds the numbers.
LOSE_HANDLED = """
WITH lost AS (
    DELETE FROM outbox_inbox WHERE (consumer_group, idempotency_key) IN (
        SELECT consumer_group, idempotency_key FROM outbox_inbox
        WHERE consumer_group = 'letters' AND delivery_count = 1 ORDER BY number LIMIT 2)
    RETURNING source, topic, lane, number
)
INSERT INTO outbox_gap (consumer_group, source, topic, lane, first_number, last_number)
SELECT 'letters', source, topic, lane, number, number FROM lost RETURNING id
"""
IS_NOT_HANDLED = """
SELECT count(*) FROM outbox_gap g WHERE NOT EXISTS (SELECT FROM outbox_inbox i WHERE i.consumer_group = g.consumer_group
    AND (i.source, i.topic, i.lane, i.number) = (g.source, g.topic, g.lane, g.first_number))
"""


@pytest.fixture(scope="module")
def lost(shop):
    with psycopg.connect(shop.database_url, autocommit=True) as connection:
        return audits.lose_one(connection)


@pytest.fixture(scope="module", autouse=True)
def archived(shop):
    with psycopg.connect(shop.database_url, autocommit=True) as connection:
        connection.execute(audits.ARCHIVED)


class TestGerman:
    @pytest.mark.parametrize("width", [1280, 400])
    def test_is_what_the_pages_are_in_where_the_browser_asks_for_it(self, width, visit):
        operator = visit(locale="de-DE")
        operator.page.set_viewport_size({"width": width, "height": 960})

        wide = []
        for name in ("overview", "messages", "deferred-messages", "gaps", "topics", "catalogue"):
            page = operator.open(PAGES[name])
            operator.photograph(f"{name}-german-{width}")
            wide += [name] if page.evaluate("document.documentElement.scrollWidth") > width else []
            assert page.get_by_role("navigation", name="Outbox").locator("a").all_inner_texts()[:2] == [
                "Übersicht",
                "Nachrichten",
            ]
        assert wide == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
class TestEachPage:
    def test_is_shown_under_a_strict_policy(self, scheme, visit):
        operator = visit(scheme=scheme)

        for name, path in PAGES.items():
            page = operator.open(path)
            page.get_by_role("navigation", name="Outbox").wait_for()
            operator.photograph(f"{name}-{scheme}")

    def test_fits_a_narrow_screen(self, scheme, visit):
        operator = visit(scheme=scheme)
        operator.page.set_viewport_size({"width": 400, "height": 800})

        wide, cut = [], []
        for name, path in PAGES.items():
            page = operator.open(path)
            wide += [name] if page.evaluate("document.documentElement.scrollWidth") > 400 else []
            cut += [name for one in page.evaluate(CUT_OFF) if one.startswith("DIV.results")]  # tables of numbers are scrolled
            operator.photograph(f"{name}-phone-{scheme}")

        assert (wide, cut) == ([], [])

    @pytest.mark.parametrize("width", [1280, 800])
    def test_cuts_no_table_off(self, scheme, width, visit):
        operator = visit(scheme=scheme)
        operator.page.set_viewport_size({"width": width, "height": 800})

        cut = {name: operator.open(path).evaluate(CUT_OFF) for name, path in PAGES.items()}

        assert {name: found for name, found in cut.items() if found} == {}

    def test_tells_the_life_of_a_message_whose_relay_was_killed(self, scheme, shop, visit):
        operator = visit(scheme=scheme)

        page = operator.open(f"/admin/outbox/messagerow/{shop.ask(SAVED)}/change/")

        for moment in (
            "Published",
            "Claimed",
            "Half message sent",
            "Commit decided",
            "Check-back: COMMIT",
            "Delivered",
            "Handled",
        ):
            page.get_by_text(moment, exact=True).first.wait_for()
        operator.photograph(f"message-{scheme}")

    def test_shows_an_error_with_its_traceback(self, scheme, shop, visit):
        operator = visit(scheme=scheme)
        page = operator.open(f"/admin/outbox/messagerow/{shop.ask(FAILING)}/change/")

        page.get_by_text("Traceback", exact=True).first.click()

        page.locator("details[open] pre").first.wait_for()
        operator.photograph(f"failing-{scheme}")


class TestOverview:
    def test_leads_to_what_needs_a_person(self, visit):
        page = visit().open(PAGES["overview"])

        page.get_by_role("link", name="Dead messages").last.click()

        page.get_by_text("The body has 4194305 bytes").first.wait_for()

    def test_has_a_drawing_that_can_be_read_aloud(self, visit):
        page = visit().open(PAGES["overview"])

        drawing = page.get_by_role("img", name="Messages published and handled, per minute")

        drawing.wait_for()
        assert "messages were published" in drawing.locator("desc").text_content()

    def test_names_the_session_that_has_locked_a_table(self, visit, shop):
        operator = visit()

        with psycopg.connect(shop.database_url, application_name="psql") as session:
            session.execute("LOCK TABLE outbox_ticket")
            command = f"pg_terminate_backend({session.info.backend_pid})"
            page = operator.open(PAGES["overview"])

        page.get_by_text(command).first.wait_for()
        operator.photograph("locked")


class TestFinding:
    def test_finds_an_order_by_its_number(self, visit):
        page = visit().open(PAGES["messages"])

        page.fill("#searchbar", "536365")
        page.get_by_role("button", name="Search").click()

        page.wait_for_url("**q=536365**")
        page.locator("#result_list tbody tr a").first.click()
        page.get_by_text("Timeline").wait_for()

    def test_finds_an_order_by_a_field_of_its_message(self, visit):
        operator = visit()
        page = operator.open(PAGES["messages"])

        page.fill("#searchbar", "invoice=536365")
        page.get_by_role("button", name="Search").click()

        page.wait_for_url("**q=invoice**")
        page.get_by_text("customer.id=7").wait_for()
        page.locator("#result_list tbody tr a").first.wait_for()
        operator.photograph("search-light")


class TestOrder:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 320])
    def test_leads_to_its_messages(self, scheme, width, shop, visit):
        operator = visit(scheme=scheme)
        operator.page.set_viewport_size({"width": width, "height": 960})

        page = operator.open(f"/admin/shop/order/{shop.ask(ORDER)}/change/")

        table = page.locator(".outbox-about")
        table.scroll_into_view_if_needed()
        operator.photograph(f"order-{width}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert table.evaluate("one => one.scrollWidth <= one.clientWidth + 1")
        table.get_by_role("link").first.focus()
        page.keyboard.press("Enter")
        page.get_by_text("Timeline").wait_for()


class TestDeadMessages:
    def test_are_sent_again_after_a_reason_was_given(self, shop, visit):
        operator = visit()
        page = operator.open(PAGES["dead-messages"])
        before = shop.ask(DEAD)

        page.check("#action-toggle")
        page.select_option("select[name=action]", "discard")
        page.get_by_role("button", name="Go").click()
        page.get_by_text("discarded messages are never sent again").wait_for()
        operator.photograph("impact-light")
        page.fill("#id_reason", "Test orders of the warehouse, never meant for us")
        page.get_by_role("button", name="Discard").click()

        page.get_by_text(f"Discarded: {before}.").wait_for()
        assert shop.ask(DEAD) == 0


class TestDeferredMessages:
    def test_are_found_by_their_error_and_discarded_with_a_trace_on_the_message(self, shop, visit):
        operator = visit()
        page = operator.open(PAGES["deferred-messages"])

        page.locator("section td.outbox-number a").first.click()
        page.locator("input.action-select").first.check()
        page.select_option("select[name=action]", "discard")
        page.get_by_role("button", name="Go").click()
        page.get_by_text("This cannot be undone").wait_for()
        page.fill("#id_reason", "A test order of the warehouse")
        page.get_by_role("button", name="Discard 1").click()
        page.get_by_text("Discarded: 1.").wait_for()

        one = shop.ask("SELECT message_id FROM outbox_operator_act WHERE act = 'discarded' AND consumer_group = 'points'")
        page = operator.open(f"/admin/outbox/messagerow/{one}/change/")
        page.get_by_text("discarded by admin for group points").wait_for()
        page.get_by_text("A test order of the warehouse").wait_for()
        operator.photograph("discarded-light")


class TestGaps:
    def test_bring_lost_messages_to_their_group(self, shop, visit):
        with psycopg.connect(shop.database_url, autocommit=True) as connection:
            rows = connection.execute(LOSE_HANDLED).fetchall()
        operator = visit()

        page = operator.open("/admin/outbox/gap/")
        operator.photograph("gaps-open")
        page.locator("#result_list .field-gap a").first.click()
        page.get_by_text("yes", exact=True).wait_for()
        operator.photograph("gap")
        page = operator.open("/admin/outbox/gap/?state=open")
        page.check("#action-toggle")
        page.select_option("select[name=action]", "deliver")
        page.get_by_role("button", name="Go").click()
        page.fill("#id_reason", "a node was lost")
        operator.photograph("gaps-impact")
        page.get_by_role("button", name="Deliver again").click()

        page.get_by_text(f"Delivered again: {len(rows)}.").wait_for()
        wait_until(lambda: not shop.ask(IS_NOT_HANDLED), 30)
        assert operator.wrong == []


class TestPausing:
    def test_puts_a_banner_on_every_page_until_it_is_resumed(self, visit):
        operator = visit()
        page = operator.open(PAGES["topics"])

        page.get_by_role("link", name="Pause order-cancellations").click()
        page.fill("#id_reason", "The warehouse counts its stock")
        page.get_by_role("button", name="Pause order-cancellations").click()
        for path in PAGES.values():
            operator.open(path).get_by_text("Topic order-cancellations is paused").wait_for()
        operator.open(PAGES["topics"])
        operator.photograph("paused-light")
        page.get_by_role("link", name="Resume order-cancellations").click()
        page.fill("#id_reason", "Counted")
        page.get_by_role("button", name="Resume order-cancellations").click()

        page.get_by_text("Topic order-cancellations is resumed.").wait_for()
        assert page.get_by_text("is paused").count() == 0


class TestAnAudit:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_is_shown_with_its_drawings(self, scheme, lost, visit):
        operator = visit(scheme=scheme)

        page = operator.open(f"/admin/outbox_pipeline/auditrun/{lost.run}/change/")

        page.get_by_role("img", name="Backlog of letters, shipments").wait_for()
        assert page.get_by_role("img").count() >= 3
        operator.photograph(f"audit-{scheme}")

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_is_one_file_that_a_telephone_shows_without_a_network(self, scheme, lost, shop, visit, tmp_path):
        operator = visit(scheme=scheme)
        file = tmp_path / "audit.html"
        page = operator.open(f"/admin/outbox_pipeline/auditrun/{lost.run}/change/")
        with page.expect_download() as download:
            page.get_by_role("link", name="report.html").click()
        download.value.save_as(file)
        report = replace(operator, page=page.context.new_page())
        asked = []
        report.page.on("request", lambda request: asked.append(request.url))

        report.page.goto(file.as_uri())
        report.photograph(f"report-{scheme}")
        report.page.set_viewport_size({"width": 400, "height": 800})
        report.photograph(f"report-phone-{scheme}")

        assert report.page.evaluate("document.documentElement.scrollWidth") <= 400
        assert asked == [file.as_uri()]
        report.page.get_by_role("link", name="lost: 1 x topic").click()
        report.page.wait_for_url(f"{shop.address}/admin/outbox_pipeline/auditfinding/*/change/")

    def test_leads_to_the_lost_message_and_sends_it_again(self, lost, shop, visit):
        operator = visit()
        page = operator.open(f"/admin/outbox_pipeline/auditrun/{lost.run}/change/")

        page.get_by_role("link", name="Show all findings of this audit").click()
        page.check("#action-toggle")
        page.select_option("select[name=action]", "resend")
        page.get_by_role("button", name="Go").click()
        page.get_by_text("Relays send them again").wait_for()
        operator.photograph("send-again-light")
        page.fill("#id_reason", "The broker's disk was full")
        page.get_by_role("button", name="Send again").click()

        page.get_by_text("Messages to send again: 1.").wait_for()
        there = f"SELECT count(*) FROM outbox_embedded_message WHERE message_id = '{lost.message}'"
        wait_until(lambda: shop.ask(there) == 1, seconds=60)


class TestAskingAgain:
    def test_asks_the_resolver_at_once_and_says_what_it_answered(self, shop, visit):
        page = visit().open(PAGES["half-messages"])

        page.locator("tr", has_text="parked").locator("input[type=checkbox]").check()
        page.select_option("select[name=action]", "ask")
        page.get_by_role("button", name="Go").click()

        page.get_by_text("UNKNOWN").first.wait_for()
        assert shop.ask("SELECT count(*) FROM outbox_check_back WHERE asked_by = 'admin'") == 1


class TestAStranger:
    def test_is_sent_to_the_login(self, shop, browser):
        page = browser.new_page()

        for path in PAGES.values():
            page.goto(shop.address + path)
            assert "/admin/login/" in page.url
        page.close()
