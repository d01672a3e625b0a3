import pytest
from django.db.models import F

from outbox import update_if, update_or_raise
from outbox.errors import StaleRow
from project.shop.models import CartEntry

pytestmark = pytest.mark.django_db


@pytest.fixture
def row() -> CartEntry:
    return CartEntry.objects.create(invoice="A1", change=1)


def stored(row: CartEntry) -> CartEntry:
    return CartEntry.objects.get(pk=row.pk)


class TestUpdateIf:
    def test_updates_row_and_instance_as_expected(self, row):
        is_updated = update_if(row, expect={"change": 1}, invoice="A2", change=F("change") + 1)

        assert is_updated
        assert (row.invoice, row.change) == (stored(row).invoice, stored(row).change) == ("A2", 2)

    def test_writes_nothing_when_another_was_faster(self, row):
        CartEntry.objects.update(change=5)

        is_updated = update_if(row, expect={"change": 1}, invoice="A2")

        assert not is_updated
        assert (row.invoice, stored(row).invoice) == ("A1", "A1")

    def test_leaves_other_rows_alone(self, row):
        other = CartEntry.objects.create(invoice="B1", change=1)

        update_if(row, expect={"change": 1}, change=2)

        assert stored(other).change == 1

    def test_takes_a_queryset(self, row):
        rows = CartEntry.objects.filter(invoice="A1")

        outcomes = [update_if(rows, expect={"change": 1}, change=2) for _ in range(2)]

        assert outcomes == [True, False]

    @pytest.mark.parametrize("arguments", [{"expect": {}, "change": 1}, {"expect": {"change": 1}}])
    def test_requires_an_expectation_and_a_change(self, row, arguments):
        with pytest.raises(TypeError, match="needs expect"):
            update_if(row, **arguments)

    @pytest.mark.django_db(databases=["default", "other"])
    def test_writes_where_the_instance_came_from(self):
        row = CartEntry.objects.using("other").create(invoice="A1", change=1)

        assert update_if(row, expect={"change": 1}, change=2)
        assert CartEntry.objects.using("other").get().change == 2


class ReadsFromAReplica:
    """Django's example of a router for a replica."""

    def db_for_read(self, model, **hints):
        return "other"

    def db_for_write(self, model, **hints):
        return "default"


@pytest.mark.django_db(databases=["default", "other"])
class TestARowThatWasReadFromAReplica:
    @pytest.fixture
    def row(self, settings) -> CartEntry:
        """A row of "default" that the router read from "other", to which it has not come yet."""
        settings.DATABASE_ROUTERS = [ReadsFromAReplica()]
        row = CartEntry.objects.create(invoice="A1", change=1)
        row._state.db = "other"
        return row

    def test_is_updated_where_it_is_written(self, row):
        is_updated = update_if(row, expect={"change": 1}, invoice="A2", change=F("change") + 1)

        assert is_updated
        assert (row.invoice, row.change) == ("A2", 2)
        assert CartEntry.objects.using("default").get().change == 2

    def test_is_said_to_be_as_it_is_there(self, row):
        CartEntry.objects.update(change=5)

        with pytest.raises(StaleRow, match="any more, but change=5"):
            update_or_raise(row, expect={"change": 1}, change=2)


class TestUpdateOrRaise:
    def test_says_how_the_row_is_now(self, row):
        CartEntry.objects.update(change=5)

        with pytest.raises(StaleRow, match=rf"shop.cartentry {row.pk} does not have change=1 any more, but change=5"):
            update_or_raise(row, expect={"change": 1}, change=2)

    def test_says_that_the_row_is_gone(self, row):
        CartEntry.objects.all().delete()

        with pytest.raises(StaleRow, match="does not exist any more"):
            update_or_raise(row, expect={"change": 1}, change=2)

    def test_goes_on_when_the_row_is_as_expected(self, row):
        update_or_raise(row, expect={"change": 1}, change=2)

        assert stored(row).change == 2
