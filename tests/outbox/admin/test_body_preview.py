import json

import pytest

from outbox.admin.body_preview import HIDDEN, READ_BYTES, SHOWN_CHARACTERS, BodyKind, readable, size_in_words
from outbox.message import Message

JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def _own_types(monkeypatch):
    monkeypatch.setattr("outbox.message.registered", {})


@pytest.fixture
def headers():
    class OrderPlaced(Message):
        order_id: int
        customer: str = ""

        class Meta:
            topic = "orders"
            mask = ["customer"]

    return {**JSON, "ce-type": "OrderPlaced"}


def read(body, headers=JSON, **options):
    return readable(body, size=len(body), headers=headers, **options)


class TestReadable:
    def test_lays_json_out_as_it_was_written(self):
        shown = read(b'{"total":1.10,"number":123456789012345678901234567890}')

        assert (shown.kind, shown.notes) == (BodyKind.JSON, ())
        assert shown.text == '{\n  "total": 1.10,\n  "number": 123456789012345678901234567890\n}'

    @pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b'{"a": 1}}'])
    def test_shows_broken_json_as_the_text_it_is(self, body):
        shown = read(body)

        assert shown.kind is BodyKind.TEXT
        assert shown.text == body.decode()[:SHOWN_CHARACTERS]
        assert shown.notes[0].startswith("It has a JSON content type, but is not valid JSON: ")

    @pytest.mark.parametrize("body", [b"\x00\xff{", b'{"a": "\xff"}'])
    def test_shows_what_is_no_text_in_hex(self, body):
        shown = read(body, {})

        assert shown.kind is BodyKind.BINARY
        assert shown.text.startswith(f"00000000  {body[:2].hex(' ')}")

    def test_shows_other_texts_as_they_are(self):
        assert read("käse;1".encode(), {"content-type": "text/csv"}).text == "käse;1"

    def test_cuts_a_body_of_four_mebibytes(self):
        shown = read(json.dumps({"text": "x" * (4 * 1024 * 1024 - 12)}).encode())

        assert shown.kind is BodyKind.JSON
        assert len(shown.text) == SHOWN_CHARACTERS
        assert shown.notes == ("Truncated: the first 64 KiB of 4.0 MiB.",)

    def test_cuts_binary_bodies_shorter(self):
        shown = read(b"\x00" * 5000, {})

        assert len(shown.text.splitlines()) == 64
        assert shown.notes == ("Only the first 1024 bytes of 4.9 KiB are shown.",)

    def test_lays_out_nothing_of_which_only_the_beginning_was_read(self):
        shown = readable(b'{"a": "', size=READ_BYTES + 1, headers=JSON)

        assert (shown.kind, shown.notes) == (BodyKind.TEXT, ("It is too large to be formatted.",))

    def test_names_a_type_that_is_gone(self):
        shown = read(b'{"a": 1}', {**JSON, "ce-type": "OrderPaid"}, unmasked=True)

        assert shown.kind is BodyKind.JSON
        assert shown.notes == ("No module defines the type OrderPaid.",)


class TestMask:
    def test_hides_its_fields(self, headers):
        shown = read(b'{"order_id": 1, "customer": "Ada"}', headers)

        assert json.loads(shown.text) == {"order_id": 1, "customer": HIDDEN}

    def test_hides_a_field_that_comes_twice(self, headers):
        assert "Ada" not in read(b'{"customer": "Ada", "customer": "Bob"}', headers).text

    def test_hides_a_field_whose_name_is_spelt_with_escapes(self, headers):
        assert "Ada" not in read(b'{"\\u0063ustomer": "Ada"}', headers).text

    def test_hides_fields_that_an_older_version_had(self, headers):
        assert "Ada" not in read(b'{"order_id": 1, "client": "Ada"}', headers).text

    def test_hides_nothing_from_whoever_may_see_it(self, headers):
        assert "Ada" in read(b'{"customer": "Ada"}', headers, unmasked=True).text

    @pytest.mark.parametrize("body", [b'{"customer": "Ada"', b'["Ada"]', b"\xff\x00Ada"])
    def test_hides_the_whole_body_where_fields_cannot_be_told_apart(self, body, headers):
        shown = read(body, headers)

        assert (shown.kind, shown.text) == (BodyKind.HIDDEN, "")
        assert shown.notes == ("Hidden: it cannot be parsed. Users who may view masked fields can see it.",)

    def test_hides_the_whole_body_of_a_type_that_is_gone(self):
        shown = read(b'{"customer": "Ada"}', {**JSON, "ce-type": "OrderPaid"})

        assert (shown.kind, shown.text) == (BodyKind.HIDDEN, "")
        assert shown.notes[0] == "No module defines the type OrderPaid."

    def test_hides_the_whole_body_of_which_only_the_beginning_was_read(self, headers):
        assert readable(b'{"customer": "Ada', size=READ_BYTES + 1, headers=headers).kind is BodyKind.HIDDEN


class TestSizeInWords:
    @pytest.mark.parametrize(
        ("size", "words"), [(1, "1 byte"), (312, "312 bytes"), (4096, "4.0 KiB"), (4 * 1024 * 1024, "4.0 MiB")]
    )
    def test_is_read_by_people(self, size, words):
        assert size_in_words(size) == words
