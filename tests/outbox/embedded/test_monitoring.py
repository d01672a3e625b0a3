import re

import pytest

from outbox.database import Connection
from outbox.embedded import EmbeddedBroker
from outbox.errors import NotMigrated
from tests.outbox.embedded.conftest import LINE, missing


class TestReadStatus:
    def test_names_the_line_that_is_missing(self, connection: Connection):
        with missing(connection, "outbox_embedded_half"), pytest.raises(NotMigrated, match=re.escape(LINE)):
            EmbeddedBroker.read_status("default", connection)
