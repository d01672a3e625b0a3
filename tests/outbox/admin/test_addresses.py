"""Whatever an address holds behind its question mark: a page, a redirection or a refusal, never an error of the server's."""

import os
import string
from datetime import datetime, timedelta, timezone
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.urls import NoReverseMatch, reverse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.models import DeadMessage, Process, State
from outbox.testing.factories import CheckBackFactory, FailedDeliveryFactory, InboxFactory
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory

pytestmark = pytest.mark.django_db

FINE = {200, 302, 400, 404}

# Of lists, of single pages, and Django's own.
NAMES = [
    *("q", "p", "o", "e", "all", "before", "_changelist_filters", "_popup", "_to_field", "_facets", "_source_model"),
    *("state", "topic", "group", "answer", "asked_by", "settled", "run", "kind", "stage", "window", "broker"),
    *("since", "from", "to", "error"),
    *("id__lt", "id__in", "id__isnull", "handled_at__gte", "topic__id__exact", "pk", "%"),
]

EDGES = [
    *("", " ", "\x00", "\ud800", "\ufeff", "%", "'", '"', "\\", "*", "(", "[", "{}", "{0}", "../..", "<script>", "\u202e", "😀"),
    *("0", "-1", "-0", "1e9", "1_0", "٣", "²", "½", "0x10", "nan", "inf", "-inf", "None", "null", "true", "False"),
    *(str(2**15), str(2**31), str(2**31 - 1), str(-(2**31) - 1), str(2**63), str(2**63 - 1), "9" * 40, "9" * 5000, "1" * 4300),
    *("0001-01-01T00:00:00-23:00", "0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59-23:59", "9999-12-31T23:59:59+14:00"),
    *("0001-01-01", "9999-12-31", "0000-00-00", "2026-02-30", "2026-13-01T25:61:61", "2026-10-25T02:30:00", "12:00", "-1-1-1"),
    *("00000000-0000-0000-0000-000000000000", "f" * 32, "{" + "0" * 32 + "}", "urn:uuid:" + "0" * 32, "0" * 31, "g" * 32),
    *("x" * 10_000, "waiting", "sent", "lost", "dead", "orders", "unresolved", "24h", "1h", "__all__", "outbox.messagerow"),
]

MOMENTS = st.datetimes(timezones=st.integers(-23, 23).map(lambda hours: timezone(timedelta(hours=hours)))).map(datetime.isoformat)
VALUES = st.one_of(
    st.sampled_from(EDGES),
    st.sampled_from(EDGES),
    MOMENTS,
    st.integers(-(2**70), 2**70).map(str),
    st.uuids(allow_nil=True).map(str),
    st.text(max_size=40),
    st.text(alphabet=string.printable, max_size=20),
)
ADDRESSES = st.lists(st.tuples(st.sampled_from(NAMES), VALUES), min_size=1, max_size=5)


def addresses_of_lists():
    """Every page of the outbox and its apps in the admin that needs no row: found, not written down."""
    found = []
    for name in sorted(_names(admin.site.get_urls())):
        try:
            found.append(reverse(f"admin:{name}"))
        except NoReverseMatch:
            continue
    return found


def _names(patterns):
    for pattern in patterns:
        if hasattr(pattern, "url_patterns"):
            yield from _names(pattern.url_patterns)
        elif pattern.name and pattern.name.startswith("outbox"):
            yield pattern.name


@pytest.fixture
def pages(orders):
    """All lists, and a page of each kind that shows one row."""
    message = MessageRowFactory(topic=orders)
    BatchFactory(topic=orders, message_ids=[message.id], state=State.DEAD)
    TicketFactory(topic=orders)
    dead = DeadMessage.objects.create(message_id=message.id, batch_id=1, topic="orders", reason="no")
    CheckBackFactory()
    return [
        *addresses_of_lists(),
        reverse("admin:outbox_messagerow_change", args=[message.id]),
        reverse("admin:outbox_deadmessage_change", args=[dead.pk]),
        reverse("admin:outbox_topic_history", args=[orders.pk]),
        reverse("admin:outbox_topic_pause", args=[orders.pk]),
        reverse("admin:outbox_topic_resume", args=[orders.pk]),
    ]


LISTS_BY_TIME = ("/inboxrow/", "/messagerow/", "/checkback/")  # and by id, and by number


def status_of(client, page, parameters):
    query = urlencode([(name, value.encode(errors="surrogatepass")) for name, value in parameters])
    return client.get(f"{page}?{query}").status_code


class TestAnAddress:
    @settings(
        max_examples=int(os.environ.get("ADDRESSES", "100")),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def test_makes_no_error_whatever_it_holds(self, admin_client, pages, data):
        page = data.draw(st.sampled_from(pages))
        parameters = data.draw(ADDRESSES)

        assert status_of(admin_client, page, parameters) in FINE

    def test_may_begin_a_list_anywhere(self, admin_client, pages):
        wrong = [
            (page, value)
            for page in pages
            for value in EDGES
            if page.endswith(LISTS_BY_TIME) and status_of(admin_client, page, [("before", value)]) not in FINE
        ]

        assert wrong == []


class TestWithoutTimeZones:
    """`USE_TZ = False`: the ORM returns times without a zone."""

    @pytest.fixture
    def with_times(self, pages, orders):
        row = InboxFactory()
        FailedDeliveryFactory(message_id=row.message_id)
        Process.objects.create(kind="relay", host="h", pid=1, broker="default")
        return [*pages, reverse("admin:outbox_messagerow_changelist") + "?since=1h", reverse("admin:outbox_overview_changelist")]

    def test_each_page_opens(self, admin_client, with_times, settings):
        settings.USE_TZ = False

        statuses = {page: admin_client.get(page).status_code for page in with_times}

        assert {page: status for page, status in statuses.items() if status not in FINE} == {}
        assert list(statuses.values()).count(200) > 10
