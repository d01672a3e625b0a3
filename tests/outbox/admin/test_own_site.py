"""An admin site of the project's own, beside Django's: what is on it leads nowhere else."""

import re

import pytest
from django.contrib import admin
from django.urls import path, reverse

from outbox.admin.dead import DeadMessageAdmin
from outbox.admin.messages import MessageAdmin
from outbox.admin.topics import OverviewAdmin, TopicAdmin
from outbox.models import DeadMessage, MessageRow, Overview, State, Topic

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

site = admin.AdminSite(name="operators")
site.register(MessageRow, MessageAdmin)
site.register(DeadMessage, DeadMessageAdmin)
site.register(Topic, TopicAdmin)
site.register(Overview, OverviewAdmin)

urlpatterns = [path("admin/", admin.site.urls), path("operators/", site.urls)]


@pytest.mark.parametrize("model", ["overview", "messagerow", "deadmessage", "topic"])
def test_links_to_itself_alone(model, message, admin_client):
    message(batch={"state": State.DEAD})

    page = admin_client.get(reverse(f"operators:outbox_{model}_changelist"))

    links = re.findall(r'href="(/[^"]*)"', page.text)
    assert [link for link in links if not link.startswith(("/operators/", "/static/"))] == ["/"]  # view site


def test_shows_no_page_that_is_not_registered(message, admin_client):
    page = admin_client.get(reverse("operators:outbox_topic_changelist"))

    assert "Check-backs" not in page.text
