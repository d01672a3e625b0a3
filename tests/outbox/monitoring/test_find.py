import json
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from django.apps import apps
from django.db import models

from outbox import database
from outbox.ids import first_id_at
from outbox.monitoring import find as module
from outbox.monitoring.find import FIRST_ID, LAST_ID, find, find_about, find_by_field, has_value, parse, read_found
from project.shop.models import Order
from tests.factories import BatchFactory, MessageRowFactory, TopicFactory

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def message(db):
    """Publish a message, by default some seconds after noon."""
    topic = TopicFactory(name="told")

    def message(second=0, **fields):
        message_id = UUID(int=first_id_at(NOON + timedelta(seconds=second)).int + uuid4().int % 2**60)
        return MessageRowFactory(topic=topic, **{"id": message_id, **fields})

    return message


@pytest.fixture
def kept():
    """The app for the models of a test, which are forgotten after it."""
    models_before = {**apps.all_models["shop"]}
    yield "shop"
    apps.all_models["shop"].clear()
    apps.all_models["shop"].update(models_before)
    apps.clear_cache()


def found(text, *, limit=20, **when):
    return find(database.raw("default"), parse(text), limit=limit, **when)


def by_field(text, *, first=FIRST_ID, end=LAST_ID, limit=20, **more):
    return find_by_field(database.raw("default"), parse(text), first=first, end=end, limit=limit, **more)


class TestParse:
    @pytest.mark.parametrize(
        ("text", "path", "value"),
        [
            ("invoice=536365", ("invoice",), "536365"),
            (" customer.id = 7 ", ("customer", "id"), "7"),
            ("formula=a=b", ("formula",), "a=b"),
            ("note=", ("note",), ""),
            ("=7", (), "7"),
            ("customer..id=7", (), "7"),
            ("536365", (), ""),
        ],
    )
    def test_reads_a_field_and_its_value(self, text, path, value):
        search = parse(text)

        assert (search.path, search.value) == (path, value)

    @pytest.mark.parametrize(
        ("text", "row"),
        [
            ("shop.Order:7", "shop.order:7"),
            ("shop.order: 007", "shop.order:7"),
            ("shop.customer:17850", "shop.customer:17850"),
        ],
    )
    def test_writes_a_row_as_it_is_stored(self, text, row):
        assert parse(text).about[-1] == row

    @pytest.mark.parametrize("text", ["shop.order:abc", "shop.nix:7", "nix:7", "shop.order", "::", "shop.order:" + "9" * 5000])
    def test_leaves_a_text_alone_that_names_no_row(self, text):
        assert parse(text).about == (text,)

    @pytest.mark.parametrize(
        ("field", "typed", "stored"),
        [
            (models.UUIDField(), "3F2504E04F8911D39A0C0305E82C3301", "3f2504e0-4f89-11d3-9a0c-0305e82c3301"),
            (models.DecimalField(max_digits=6, decimal_places=2), "6", "6.00"),
        ],
        ids=["uuid", "decimal"],
    )
    @pytest.mark.django_db  # which writes the decimal
    def test_takes_a_key_in_any_form(self, field, typed, stored, kept):
        class Kept(models.Model):  # noqa: DJ008
            key = field.__class__(primary_key=True, **field.deconstruct()[3])

            class Meta:
                app_label = kept

        assert parse(f"shop.Kept:{typed}").about[-1] == f"shop.kept:{stored}"

    @pytest.mark.parametrize("typed", ["7,EU", "(7, EU)", "(7, 'EU')"])
    def test_takes_a_key_of_several_columns(self, typed, kept):
        class Line(models.Model):  # noqa: DJ008
            pk = models.CompositePrimaryKey("number", "region")
            number = models.IntegerField()
            region = models.TextField()

            class Meta:
                app_label = kept

        assert parse(f"shop.line:{typed}").about[-1] == "shop.line:(7, 'EU')"


class TestFind:
    def test_finds_a_message_by_its_id_whenever_it_was(self, message):
        row = message()

        assert found(str(row.id)).ids == found(row.id.hex, since=NOON + timedelta(days=1)).ids == [row.id]

    def test_finds_messages_by_key_and_by_row_newest_first(self, message):
        old, new = message(key="536365"), message(1, about="shop.order:7")
        message(key="5363651", about="shop.order:70")

        assert found("536365").ids == [old.id]
        assert found("shop.Order:7").ids == [new.id]

    def test_finds_a_key_that_has_the_form_of_an_id_where_no_message_has_it(self, message):
        key = uuid4()
        row = message(key=str(key))

        assert found(str(key)).ids == [row.id]
        assert found(str(message(id=key).id)).ids == [key]

    def test_finds_a_key_with_an_equals_sign_before_it_reads_bodies(self, message):
        row = message(key="a=b")
        message(body=b'{"a": "b"}')

        assert found("a=b").ids == [row.id]

    def test_finds_a_field_of_bodies(self, message):
        row = message(body=b'{"invoice": "536365"}')

        assert found("invoice=536365").ids == [row.id]

    def test_keeps_to_a_time(self, message):
        first, second = message(0, key="k", body=b'{"a":1}'), message(5, key="k", body=b'{"a":1}')
        between = NOON + timedelta(seconds=3)

        for text in ("k", "a=1"):
            assert found(text, since=between).ids == [second.id]
            assert found(text, until=between).ids == [first.id]

    def test_says_that_there_are_more(self, message):
        rows = [message(second, key="k") for second in range(3)]

        assert found("k", limit=3) == module.Found([row.id for row in reversed(rows)])
        assert found("k", limit=2) == module.Found([rows[2].id, rows[1].id], is_cut=True)

    @pytest.mark.parametrize("text", ["", "nix", "0", "nix=1", "0199d3a4-7f6e-7c3e-9d3b-3d9f1c5f2a11"])
    def test_finds_nothing(self, text, message):
        message(key="", about=None, body=b"{}")

        assert found(text) == module.Found([])

    def test_passes_tombstones_over(self, message):
        row = message(topic_id=0, key="k", body=b'{"a":1}')

        assert [found(text).ids for text in (str(row.id), "k", "a=1")] == [[], [], []]


class TestFindByField:
    @pytest.mark.parametrize(
        "body", [b"", b"{", b"\x00\xff a 1", b"[1", b'"a"', b"1", b'{"a":' * 5000, b'{"a":1}\xff', b'{"a":NaN}']
    )
    def test_passes_bodies_over_that_are_not_json(self, body, message):
        row = message(body=b'{"a":1}')
        message(1, body=body)

        assert by_field("a=1").ids == [row.id]

    def test_passes_large_bodies_over(self, message):
        message(body=json.dumps({"a": 1, "b": "x" * module.BODY_BYTES}).encode())

        assert by_field("a=1").ids == []

    @pytest.mark.parametrize("value", ["Müller", "a/b", 'say "hi"', "back\\slash", "<b>", "tab\tin"])
    @pytest.mark.parametrize("is_ascii", [True, False], ids=["escaped", "utf-8"])
    def test_finds_what_an_encoder_may_escape(self, value, is_ascii, message):
        row = message(body=json.dumps({"größe": value}, ensure_ascii=is_ascii).replace("/", "\\/").encode())

        assert by_field(f"größe={value}").ids == [row.id]

    def test_looks_at_the_newest_messages_of_the_range_and_says_so(self, message, monkeypatch):
        monkeypatch.setattr(module, "MAX_MESSAGES_READ", 2)
        rows = [message(second, body=b'{"a":1}') for second in range(4)]

        newest = by_field("a=1")
        older = by_field("a=1", end=newest.reached)

        assert newest == module.Found([rows[3].id, rows[2].id, rows[1].id], is_cut=True, reached=rows[1].id)
        assert older == module.Found([rows[0].id])

    def test_goes_on_where_it_had_enough(self, message):
        rows = [message(second, body=b'{"a":1}') for second in range(3)]

        newest = by_field("a=1", limit=2)

        assert (newest.ids, newest.is_cut) == ([rows[2].id, rows[1].id], True)
        assert by_field("a=1", limit=2, end=newest.reached).ids == [rows[0].id]

    def test_reads_bodies_in_chunks(self, message, monkeypatch):
        monkeypatch.setattr(module, "CHUNK", 2)
        rows = [message(second, body=b'{"a":1}') for second in range(5)]

        assert by_field("a=1").ids == [row.id for row in reversed(rows)]

    def test_ends_when_its_time_is_up(self, message, monkeypatch):
        message(body=b'{"a":1}')
        monkeypatch.setattr(module, "MAX_SECONDS", 0.0)
        monkeypatch.setattr(module, "CANDIDATES", f"SELECT pg_sleep(5) FROM ({module.CANDIDATES}) one")
        began = time.monotonic()

        late = by_field("a=1")

        assert late == module.Found([], is_cut=True, reached=None, is_late=True)
        assert time.monotonic() - began < 4

    def test_leaves_the_time_out_of_the_connection_as_it_was(self, message):
        connection = database.raw("default")
        connection.execute("SET LOCAL statement_timeout = '17s'")

        by_field("a=1")

        assert connection.execute("SHOW statement_timeout").fetchone() == ("17s",)

    def test_returns_what_the_person_may_read(self, message):
        row = message(body=b'{"a":{"b":1}}', headers='{"ce-type": "Open"}')
        message(body=b'{"a":{"b":1}}', headers='{"ce-type": "Closed"}')

        may_read = by_field("a.b=1", may_read=lambda headers, field: (headers["ce-type"], field) == ("Open", "a"))

        assert may_read.ids == [row.id]


class TestHasValue:
    @pytest.mark.parametrize(
        ("body", "text"),
        [
            ('{"a": "7"}', "a=7"),
            ('{"a": 7}', "a=7"),
            ('{"a": 7.00}', "a=7.00"),
            ('{"a": true}', "a=true"),
            ('{"a": null}', "a=null"),
            ('{"a": ""}', "a="),
            ('{"a": {"b": {"c": "x y"}}}', "a.b.c=x y"),
            ('{"lines": [{"sku": "A"}, {"sku": "B"}]}', "lines.sku=B"),
            ('{"tags": ["A", "B"]}', "tags=B"),
            ('[["x"], {"order": 7}, {}]', "order=7"),
        ],
    )
    def test_is_true(self, body, text):
        search = parse(text)

        assert has_value(body.encode(), search.path, search.value)

    @pytest.mark.parametrize(
        ("body", "text"),
        [
            ('{"a": "77"}', "a=7"),
            ('{"a": 7.0}', "a=7"),
            ('{"b": 7}', "a=7"),
            ('{"a": {"b": 7}}', "a=7"),
            ('{"a": {"b": 7}}', "b=7"),
            ('{"a": 7}', "a.b=7"),
            ('{"a": {"b": 7}}', 'a={"b": 7}'),
            ("7", "a=7"),
        ],
    )
    def test_is_false(self, body, text):
        search = parse(text)

        assert not has_value(body.encode(), search.path, search.value)


class TestFindAbout:
    def about(self, row, limit=20):
        return find_about(database.raw("default"), row, "default", limit=limit)

    def test_finds_the_messages_about_a_row_newest_first(self, message):
        rows = [message(second, about="shop.order:7") for second in range(3)]
        message(about="shop.order:70", key="7")

        assert self.about(Order(pk=7)).ids == [row.id for row in reversed(rows)]
        assert self.about(Order(pk=7), limit=2).is_cut
        assert self.about(Order(pk=8)) == module.Found([])

    def test_knows_a_proxy_and_the_rows_of_parents(self, message, kept):
        class Item(models.Model):  # noqa: DJ008
            class Meta:
                app_label = kept

        class Book(Item):  # noqa: DJ008
            class Meta:
                app_label = kept

        class Novel(Book):  # noqa: DJ008
            class Meta:
                app_label = kept
                proxy = True

        rows = [message(0, about="shop.item:7"), message(1, about="shop.book:7")]

        assert self.about(Novel(id=7, item_ptr_id=7)).ids == [rows[1].id, rows[0].id]
        assert self.about(Item(pk=7)).ids == [rows[0].id]

    def test_knows_a_uuid_in_any_form(self, message, kept):
        class Parcel(models.Model):  # noqa: DJ008
            key = models.UUIDField(primary_key=True)

            class Meta:
                app_label = kept

        row = message(about="shop.parcel:3f2504e0-4f89-11d3-9a0c-0305e82c3301")

        assert self.about(Parcel(pk="3F2504E04F8911D39A0C0305E82C3301")).ids == [row.id]


class TestReadFound:
    def test_says_what_a_message_is(self, message):
        row = message(key="k", about="shop.order:7", headers='{"ce-type": "OrderPlaced"}', created_at=NOON)
        BatchFactory(topic_id=row.topic_id, message_ids=[row.id], state=3)

        (one,) = read_found(database.raw("default"), [row.id, uuid4()])

        assert (one.id, one.topic, one.type, one.key, one.about) == (row.id, "told", "OrderPlaced", "k", "shop.order:7")
        assert (one.created_at, one.state) == (NOON, "sent")
