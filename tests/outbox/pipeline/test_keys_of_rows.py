"""The key of a row that a message is about, as it was published, and as the audit reads it from the row's table."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, models, transaction
from django.db.models.functions import Now
from django.test.utils import isolate_apps
from django.utils.functional import SimpleLazyObject

from outbox import Envelope, database, publish, publish_many
from outbox.check_backs.sources import About, look_up
from outbox.errors import InvalidMessage
from outbox.models import MessageRow
from outbox.monitoring.find import find_about, parse
from outbox.pipeline.conf import AuditSettings
from outbox.pipeline.job_config import business_of
from outbox.pipeline.spark.statements import of_business
from tests.outbox.publishing.rows import OrderMade

pytestmark = pytest.mark.django_db


class Prefixed(models.CharField):
    """A key that programs see as `usr_…`, and of which the table has the rest."""

    def to_python(self, value: Any) -> Any:
        return value if value is None or str(value).startswith("usr_") else f"usr_{value}"

    from_db_value = lambda self, value, expression, connection: self.to_python(value)  # noqa: E731

    def get_prep_value(self, value: Any) -> Any:
        return str(value).removeprefix("usr_")


class Ulid(models.UUIDField):
    """A key that programs see as a number in hexadecimal digits, and that the table has as a uuid."""

    def to_python(self, value: Any) -> Any:
        return value if value is None or isinstance(value, Hex) else Hex(uuid.UUID(str(value)).hex.upper())

    from_db_value = lambda self, value, expression, connection: self.to_python(value)  # noqa: E731

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        return uuid.UUID(str(value))


class Hex(str):
    pass


class Colour(str, enum.Enum):  # noqa: UP042  (its text is not its value)
    RED = "red"


ID = uuid.uuid4()

KEYS: dict[str, tuple[models.Field[Any, Any], Any]] = {
    "auto": (models.AutoField(primary_key=True), 7),
    "integer as text": (models.IntegerField(primary_key=True), " 6 "),
    "big auto": (models.BigAutoField(primary_key=True), 2**60),
    "small": (models.SmallIntegerField(primary_key=True), -3),
    "uuid": (models.UUIDField(primary_key=True), ID),
    "uuid as text": (models.UUIDField(primary_key=True), ID.hex.upper()),
    "text": (models.CharField(primary_key=True, max_length=20), "Größe: 7"),
    "enum": (models.CharField(primary_key=True, max_length=20), Colour.RED),
    "slug": (models.SlugField(primary_key=True), "a-b"),
    "inet": (models.GenericIPAddressField(primary_key=True), "10.0.0.1"),
    "inet of v6": (models.GenericIPAddressField(primary_key=True), "2001:0db8::0001"),
    "float": (models.FloatField(primary_key=True), 1.0),
    "large float": (models.FloatField(primary_key=True), 1e22),
    "decimal": (models.DecimalField(primary_key=True, max_digits=9, decimal_places=3), Decimal("1.5")),
    "decimal as text": (models.DecimalField(primary_key=True, max_digits=9, decimal_places=3), "6"),
    "duration": (models.DurationField(primary_key=True), timedelta(days=1, seconds=3, microseconds=500)),
    "boolean": (models.BooleanField(primary_key=True), True),
    "date": (models.DateField(primary_key=True), date(2026, 1, 2)),
    "time": (models.TimeField(primary_key=True), time(9, 5, 0, 500_000)),
    "moment": (models.DateTimeField(primary_key=True), datetime(2026, 7, 2, 9, 5, tzinfo=UTC)),
    "bytes": (models.BinaryField(primary_key=True), b"\x00\xff"),
    "prefixed": (Prefixed(primary_key=True, max_length=20), "usr_4711"),
    "ulid": (Ulid(primary_key=True), Hex(ID.hex.upper())),
}


def made(base: type[models.Model] = models.Model, name: str = "Row", **fields: Any) -> type[models.Model]:
    """Make a model and its table."""
    meta = type("Meta", (), {"app_label": "shop"})
    model = type(name, (base,), {"__module__": __name__, "Meta": meta, **fields})
    with connection.schema_editor() as editor:
        editor.create_model(model)
    return model


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[Callable[..., type[models.Model]]]:
    settings.OUTBOX = {"TOPICS": {"made": {}}, "CELERY_WAKEUP": False}
    with isolate_apps("project.shop") as isolated:
        both = SimpleNamespace(get_model=lambda label: isolated.get_model(label), get_models=isolated.get_models)
        for module in ("outbox.pipeline.job_config", "outbox.monitoring.find", "outbox.check_backs.sources"):
            monkeypatch.setattr(f"{module}.apps", both)
        yield made


def saved(make: Callable[..., type[models.Model]], kind: str) -> models.Model:
    """Save a row with a key of a kind."""
    field, key = KEYS[kind]
    row = make(key=field.clone())(key=key)
    row.save(force_insert=True)
    return row


def rows_of(model: type[models.Model]) -> list[str]:
    """Return the rows as the audit reads them."""
    entry = business_of("rows", AuditSettings(model._meta.label, "OrderMade"))
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL TIME ZONE 'Asia/Tokyo'")
        cursor.execute(of_business(entry).query)
        return [about for _, _, about, _ in cursor.fetchall()]


def abouts() -> list[str | None]:
    return list(MessageRow.objects.order_by("id").values_list("about", flat=True))


class TestTheKey:
    @pytest.mark.parametrize("kind", KEYS)
    def test_is_written_as_the_table_has_it(self, make, kind):
        row = saved(make, kind)

        with transaction.atomic():
            publish(OrderMade(order_id=1), about=row)
            publish_many([Envelope(OrderMade(order_id=2), about=type(row)._base_manager.get())])

        assert abouts() == rows_of(type(row)) * 2

    @pytest.mark.parametrize("kind", KEYS)
    def test_leads_back_to_the_row(self, make, kind):
        row, key = saved(make, kind), KEYS[kind][1]
        with transaction.atomic():
            receipt = publish(OrderMade(order_id=1), about=row)

        raw = database.raw("default")
        assert look_up(raw, str(receipt.message_id)) is About.EXISTS
        assert find_about(raw, row, "default", limit=10).ids == [receipt.message_id]
        assert abouts()[0] in parse(f"shop.row:{str.__str__(key) if isinstance(key, str) else key}").about or kind == "bytes"

    def test_of_another_row_is_written_as_that_is(self, make):
        other = make(key=KEYS["prefixed"][0].clone())
        model = make(name="Profile", row=models.OneToOneField(other, models.CASCADE, primary_key=True))
        row = model.objects.create(row=other.objects.create(key="usr_4711"))

        with transaction.atomic():
            publish(OrderMade(order_id=1), about=row)

        assert abouts() == rows_of(model) == ["shop.profile:4711"]

    def test_that_the_database_is_still_to_make_is_refused(self, make):
        model = make(key=models.DateTimeField(primary_key=True, db_default=Now()))

        with transaction.atomic(), pytest.raises(InvalidMessage, match=r"a row of shop\.Row that has no primary key"):
            publish(OrderMade(order_id=1), about=model())

    def test_of_a_lazy_row_is_that_of_the_row(self, make):
        row = make(key=KEYS["auto"][0].clone()).objects.create(key=7)

        with transaction.atomic():
            publish(OrderMade(order_id=1), about=SimpleLazyObject(lambda: row))
            publish_many([Envelope(OrderMade(order_id=1), about=SimpleLazyObject(lambda: row))])

        assert abouts() == ["shop.row:7"] * 2


class TestAChild:
    def test_has_the_key_of_its_parent(self, make):
        child = make(make(key=KEYS["uuid"][0].clone()), "Child")
        row = child(pk=ID.hex)
        row.save(force_insert=True)

        with transaction.atomic():
            publish(OrderMade(order_id=1), about=row)

        assert abouts() == rows_of(child) == [f"shop.child:{ID}"]

    def test_is_a_row_of_its_parent(self, make):
        parent = make(size=models.IntegerField())
        child = make(parent, "Child")
        make(child, "Grandchild")

        entry = business_of("rows", AuditSettings("shop.Row", "OrderMade"))

        assert entry.also == ["shop.child", "shop.grandchild"]
