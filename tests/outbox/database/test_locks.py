"""Each advisory lock has a number of its own."""

import re
from pathlib import Path

import outbox
from outbox.database.locks import Lock

PACKAGE = Path(outbox.__file__).parent
ADVISORY_LOCK = re.compile(r"pg_(?:try_)?advisory_(?:xact_)?(?:un)?lock(?:_shared)?\(([^,)]*)")


class TestLock:
    def test_has_no_number_twice(self):
        assert len(Lock) == len(Lock.__members__)

    def test_is_where_every_statement_has_its_number_from(self):
        numbers = {path.relative_to(PACKAGE): ADVISORY_LOCK.findall(path.read_text()) for path in PACKAGE.rglob("*.py")}

        assert {path: found for path, found in numbers.items() if not all(one.startswith("{Lock.") for one in found)} == {}
