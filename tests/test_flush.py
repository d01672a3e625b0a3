from types import SimpleNamespace

import pytest

from outbox import database
from tests.flush import flush

ONE_DATABASE = SimpleNamespace(_databases_names=lambda include_mirrors: ["default"])


@pytest.mark.django_db(transaction=True)
class TestFlush:
    def test_forgets_a_relay_that_was_killed_on_call(self):
        with database.connect("default") as relay:
            relay.execute("INSERT INTO outbox_wakeup VALUES ('default', 1)")

        flush(ONE_DATABASE)

        assert database.raw("default").execute("SELECT count(*) FROM outbox_wakeup").fetchone() == (0,)
