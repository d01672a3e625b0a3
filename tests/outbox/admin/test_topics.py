import re

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse

from outbox import database
from outbox.models import Topic
from outbox.topics import pause, resume, write_topics

pytestmark = pytest.mark.django_db

LIST = "admin:outbox_topic_changelist"
ALL = ["view_topic", "pause_topic"]


def at(verb, topic):
    return reverse(f"admin:outbox_topic_{verb}", args=[topic.pk])


def since(page):
    return re.search(r'name="since"(?: value="([^"]*)")?', page.text).group(1) or ""


class TestPause:
    def test_pauses_after_asking_why_and_notes_it(self, orders, operator):
        client = operator(*ALL)
        before = client.get(at("pause", orders))

        page = client.post(at("pause", orders), {"reason": "the warehouse moves"}, follow=True)

        orders.refresh_from_db()
        assert before.status_code == 200
        assert (orders.paused, orders.paused_by, orders.pause_reason) == (True, "ada", "the warehouse moves")
        assert "Topic orders is paused" in page.text
        assert LogEntry.objects.get().get_change_message() == "Paused. Reason: the warehouse moves"

    def test_requires_a_reason(self, orders, operator):
        page = operator(*ALL).post(at("pause", orders), {"reason": ""})

        orders.refresh_from_db()
        assert "This field is required." in page.text
        assert not orders.paused

    def test_says_that_another_has_paused_it(self, orders, operator):
        pause(database.raw("default"), "orders", by="bob", reason="lunch")

        page = operator(*ALL).post(at("pause", orders), {"reason": "x"}, follow=True)

        orders.refresh_from_db()
        assert "Topic orders was paused already." in page.text
        assert orders.paused_by == "bob"
        assert not LogEntry.objects.exists()

    @pytest.mark.django_db(transaction=True)
    def test_says_so_only_of_what_is_committed(self, operator):
        write_topics("default")
        orders = Topic.objects.get(name="orders")
        client = operator(*ALL)
        client.raise_request_exception = False
        transaction.set_autocommit(False)  # as what fails in the middle of a commit leaves the thread's connection

        first = client.post(at("pause", orders), {"reason": "the warehouse moves"}).status_code
        connection.close()
        orders.refresh_from_db()
        is_paused = orders.paused
        second = client.post(at("pause", orders), {"reason": "the warehouse moves"}).status_code
        connection.close()
        orders.refresh_from_db()

        assert (first, is_paused, second, orders.paused) == (500, False, 302, True)


class TestResume:
    def test_ends_the_pause_that_the_person_saw(self, orders, operator):
        pause(database.raw("default"), "orders", by="bob", reason="<i>lunch</i>")
        client = operator(*ALL)
        page = client.get(at("resume", orders))

        client.post(at("resume", orders), {"reason": "lunch is over", "since": since(page)})

        orders.refresh_from_db()
        assert "&lt;i&gt;lunch&lt;/i&gt;" in page.text
        assert not orders.paused
        assert LogEntry.objects.get().get_change_message() == "Resumed. Reason: lunch is over"

    def test_leaves_a_newer_pause_alone(self, orders, operator):
        pause(database.raw("default"), "orders", by="bob", reason="lunch")
        client = operator(*ALL)
        seen = since(client.get(at("resume", orders)))
        orders.refresh_from_db()
        resume(database.raw("default"), "orders", since=orders.paused_at)
        pause(database.raw("default"), "orders", by="eve", reason="the database moves")

        page = client.post(at("resume", orders), {"reason": "lunch is over", "since": seen}, follow=True)

        orders.refresh_from_db()
        assert orders.paused_by == "eve"
        assert "that pause has ended, or another one has begun" in page.text

    @pytest.mark.parametrize("paused_at", ["2026-11-01 05:30+00", "2026-11-01 06:30+00"], ids=["first", "second"])
    def test_ends_a_pause_of_the_hour_that_is_repeated_when_summer_time_ends(self, paused_at, orders, operator, settings):
        settings.USE_TZ, settings.TIME_ZONE = False, "America/New_York"
        pause(database.raw("default"), "orders", by="bob", reason="lunch")
        with connection.cursor() as cursor:
            cursor.execute("UPDATE outbox_topic SET paused_at = %s", [paused_at])
        client = operator(*ALL)

        client.post(at("resume", orders), {"reason": "lunch is over", "since": since(client.get(at("resume", orders)))})

        orders.refresh_from_db()
        assert not orders.paused

    @pytest.mark.parametrize("wild", ["abc", "2026-99-99T00:00", "x" * 1000])
    def test_takes_a_wild_time_for_none(self, wild, orders, operator):
        pause(database.raw("default"), "orders", by="bob", reason="lunch")

        operator(*ALL).post(at("resume", orders), {"reason": "x", "since": wild})

        orders.refresh_from_db()
        assert orders.paused


class TestPermissions:
    @pytest.mark.parametrize("verb", ["pause", "resume"])
    def test_hide_the_act_and_forbid_it(self, verb, orders, operator):
        if verb == "resume":
            pause(database.raw("default"), "orders", by="bob", reason="lunch")
        client = operator("view_topic")

        answers = [client.get(at(verb, orders)), client.post(at(verb, orders), {"reason": "x"})]

        orders.refresh_from_db()
        assert [answer.status_code for answer in answers] == [403, 403]
        assert at(verb, orders) not in client.get(reverse(LIST)).text
        assert orders.paused == (verb == "resume")

    def test_send_strangers_to_the_login(self, orders):
        assert Client().post(at("pause", orders), {"reason": "x"}).url.startswith(reverse("admin:login"))

    def test_are_asked_for_before_a_form_of_another_site(self, orders, operator):
        strict = Client(enforce_csrf_checks=True)
        strict.cookies = operator(*ALL).cookies

        assert strict.post(at("pause", orders), {"reason": "x"}).status_code == 403


class TestHistory:
    def test_shows_who_paused_and_why(self, orders, operator):
        client = operator(*ALL)
        client.post(at("pause", orders), {"reason": "the warehouse moves"})

        assert "the warehouse moves" in client.get(reverse("admin:outbox_topic_history", args=[orders.pk])).text
