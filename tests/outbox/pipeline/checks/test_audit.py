import pytest

from outbox import Message


@pytest.fixture
def outbox():
    class OrderPlaced(Message):
        order_id: int

        class Meta:
            topic = "orders"

    def outbox(**entry):
        given = {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", "AT": "placed_at", **entry}
        return {"TOPICS": {"orders": {}}, "PIPELINE": {"AUDIT": {"orders": given}}}

    return outbox


class TestE038:
    @pytest.mark.parametrize(
        ("entry", "text", "hint"),
        [
            ({"MODEL": "shop.Odrer"}, "names the model 'shop.Odrer'", 'Write "app.Model".'),
            ({"MODEL": "Order"}, "names the model 'Order'", 'Write "app.Model".'),
            ({"EXPECTS": "OrderPlaecd"}, "expects 'OrderPlaecd', but no message type", "Write the name of the type"),
            ({"AT": "placed"}, "has AT 'placed', but Order has no such field.", "Its fields are country, customer"),
        ],
        ids=["a model that is not there", "a model without its app", "a type nobody registered", "a field that is not there"],
    )
    def test_finds_what_is_not_there(self, settings, found, outbox, entry, text, hint):
        settings.OUTBOX = outbox(**entry)

        (problem,) = found()

        assert problem.id == "outbox.E038"
        assert problem.msg.startswith(f'OUTBOX["PIPELINE"]["AUDIT"]["orders"] {text}')
        assert problem.hint.startswith(hint)

    def test_finds_all_that_is_wrong_with_an_entry(self, settings, found, outbox):
        settings.OUTBOX = outbox(EXPECTS="OrderPlaecd", AT="placed")

        assert [problem.id for problem in found()] == ["outbox.E038"] * 2

    @pytest.mark.parametrize("entry", [{}, {"AT": ""}, {"WHERE": "this is no SQL"}], ids=["whole", "no AT", "SQL is not read"])
    def test_is_quiet_otherwise(self, settings, found, outbox, entry):
        settings.OUTBOX = outbox(**entry)

        assert found() == []
