import re

import pytest

from outbox.brokers.base import BrokerStatus
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker
from outbox.errors import NotMigrated
from tests.outbox.embedded.conftest import LINE, missing


class TestStoredIn:
    def test_is_the_database_that_the_options_name(self):
        assert EmbeddedBroker.stored_in({"DATABASE": "other"}) == "other"
        assert EmbeddedBroker.stored_in({}) == "default"


class TestReadStatus:
    def test_is_empty_in_another_database(self, connection: Connection):
        assert EmbeddedBroker.read_status({"DATABASE": "other"}, "default", connection) == BrokerStatus()

    def test_names_the_line_that_is_missing(self, connection: Connection):
        with missing(connection, "outbox_embedded_half"), pytest.raises(NotMigrated, match=re.escape(LINE)):
            EmbeddedBroker.read_status({}, "default", connection)


@pytest.mark.django_db(transaction=True)
class TestReadCopies:
    def test_names_the_line_that_is_missing(self, connection: Connection):
        with missing(connection, "outbox_embedded_message"), pytest.raises(NotMigrated, match=re.escape(LINE)):
            EmbeddedBroker.read_copies({}, "m", [])
