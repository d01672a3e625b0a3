from decimal import Decimal

import msgspec
import pytest

from project.shop.intake import NotAccepted, ShopError, SubmittedInvoice, SubmittedLine, read_invoice, validate

GOOD = SubmittedLine(line=2, stock_code="85123A", description="WHITE HANGING HEART", quantity="6", unit_price="2.55")


def submitted(*lines, **changes):
    invoice = SubmittedInvoice(
        invoice="536365", invoiced_at="2010-12-01 08:26:00", country="United Kingdom", lines=list(lines), customer="17850"
    )
    return msgspec.structs.replace(invoice, **changes)


def line(**changes):
    return msgspec.structs.replace(GOOD, **changes)


class TestJudge:
    def test_accepts_a_good_line(self):
        validated = validate(submitted(GOOD), cancels=False)

        assert [line.amount for line in validated.accepted] == [Decimal("15.30")]
        assert validated.total == Decimal("15.30")
        assert validated.refused == []

    def test_reads_dates_as_the_shops_local_time(self):
        validated = validate(submitted(GOOD, invoiced_at="2010-07-01 08:26:00"), cancels=False)

        assert validated.invoiced_at.isoformat() == "2010-07-01T08:26:00+01:00"

    def test_turns_a_cancellations_quantity_positive(self):
        validated = validate(submitted(line(quantity="-6"), invoice="C536379"), cancels=True)

        assert [line.quantity for line in validated.accepted] == [6]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"description": "", "unit_price": "0.0"}, "a stock correction, not a sale"),
            ({"unit_price": "0.0"}, "price 0.0: nothing is sold for that"),
            ({"unit_price": "-11062.06"}, "price -11062.06: nothing is sold for that"),
            ({"unit_price": "cheap"}, "price 'cheap' is not a number"),
            ({"unit_price": "NaN"}, "price NaN is beyond"),
            ({"unit_price": "1e99"}, "price 1e99 is beyond"),
            ({"unit_price": "2.555"}, "fractions of a penny"),
            ({"quantity": "-10"}, "quantity -10 on an order: it must be positive"),
            ({"quantity": "0"}, "quantity 0 on an order"),
            ({"quantity": "six"}, "quantity 'six' is not a whole number"),
            ({"quantity": "99999999"}, "quantity 99999999 is beyond"),
            ({"stock_code": ""}, "no stock code"),
        ],
    )
    def test_refuses_a_dirty_line_with_a_reason_and_keeps_the_others(self, changes, reason):
        validated = validate(submitted(GOOD, line(line=3, **changes)), cancels=False)

        assert len(validated.accepted) == 1
        assert [refused.line.line for refused in validated.refused] == [3]
        assert reason in validated.refused[0].reason

    def test_refuses_a_positive_quantity_on_a_cancellation(self):
        validated = validate(submitted(GOOD, invoice="C536379"), cancels=True)

        assert "quantity 6 on a cancellation" in validated.refused[0].reason

    @pytest.mark.parametrize("number", ["", "A563185", "C536365", "536365; DROP", "12"])
    def test_refuses_an_order_whose_number_is_none(self, number):
        with pytest.raises(NotAccepted, match="is not 6 to 10 digits"):
            validate(submitted(GOOD, invoice=number), cancels=False)

    def test_refuses_a_cancellation_with_the_number_of_an_order(self):
        with pytest.raises(NotAccepted, match="is not C and 6 to 10 digits"):
            validate(submitted(GOOD), cancels=True)

    @pytest.mark.parametrize("date", ["", "yesterday", "2010-13-01 08:26:00"])
    def test_refuses_an_order_without_a_date(self, date):
        with pytest.raises(NotAccepted, match="date"):
            validate(submitted(GOOD, invoiced_at=date), cancels=False)


class TestReadInvoice:
    def test_gives_back_what_was_submitted(self):
        invoice = submitted(GOOD)

        assert read_invoice(msgspec.json.encode(invoice)) == invoice

    @pytest.mark.parametrize(
        ("body", "reason"), [(b"", "truncated"), (b"[]", "Expected `object`"), (b"{}", "missing required field `invoice`")]
    )
    def test_names_what_does_not_fit(self, body, reason):
        with pytest.raises(ShopError, match=reason):
            read_invoice(body)
