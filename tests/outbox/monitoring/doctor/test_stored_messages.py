import json

import pytest

from outbox.message import Header
from outbox.monitoring.doctor import check, check_stored_messages
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SUBJECT = "messages in database 'default'"


@pytest.fixture
def wait():
    """Store a waiting message of a type with this body."""

    def wait(type_name, body):
        headers = json.dumps({Header.TYPE: type_name, Header.VERSION: "1", Header.CONTENT_TYPE: "application/json"})
        TicketFactory(message=MessageRowFactory(topic=TopicFactory(name="orders"), headers=headers, body=body))

    return wait


class TestStoredMessages:
    def test_are_not_mentioned_where_there_are_none(self, about):
        assert about(check_stored_messages, SUBJECT) == []

    def test_are_well_where_they_can_be_read(self, about, wait):
        wait("OrderPlaced", b'{"invoice": "1", "customer": null, "items": 1, "total": "1.50"}')

        assert about(check_stored_messages, SUBJECT) == [("ok", "1 waiting message read")]

    def test_need_attention_where_they_cannot(self, about, wait):
        wait("OrderPlaced", b'{"invoice": "1", "customer": null, "items": 1}')

        ((level, text),) = about(check_stored_messages, SUBJECT)

        assert level == "warning"
        assert text.startswith("1 waiting message of OrderPlaced version 1 cannot be read: Object missing required field `total`")

    def test_are_a_part_of_the_doctors_checks(self, about, wait):
        wait("OrderPlaced", b'{"invoice": "1", "customer": null, "items": 1, "total": "1.50"}')

        assert about(check, SUBJECT) == [("ok", "1 waiting message read")]
