"""The page of fault points: each test that it names is there, and each failpoint of a message's way is named."""

import re
from pathlib import Path

import pytest

from outbox.testing.crash import PLACES, TRANSACTIONS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "tests/fault-points.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/\S+?\.py)::(test_\w+)`", PAGE)))
OF_PROTOCOL = range(1, 35)


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_each_test_that_it_names_is_there(path, name):
    assert re.search(rf"def {name}\(", (ROOT / path).read_text())


def test_each_fault_of_the_protocol_is_named():
    rows = re.findall(r"^\| (\d[\d, ]*) \|", PAGE, re.MULTILINE)

    assert {int(number) for row in rows for number in row.split(", ")} == set(OF_PROTOCOL)


def test_each_failpoint_of_a_transaction_and_a_consumer_is_named():
    wanted = {*TRANSACTIONS, *(place for place in PLACES if place.startswith("consumer."))}

    assert {place for place in wanted if f"`{place}`" not in PAGE} == set()
