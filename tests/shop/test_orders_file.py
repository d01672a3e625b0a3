import csv
import gzip
from collections import Counter

import pytest

from project.shop.orders_file import COLUMNS, DAY, OrdersFileError, read_orders

LINE = ["536365", "85123A", "WHITE HANGING HEART", "6", "2010-12-01 08:26:00", "2.55", "17850.0", "United Kingdom"]


@pytest.fixture
def orders_file(tmp_path):
    def write(*lines, header=COLUMNS, name="orders.csv", encoding="utf-8"):
        path = tmp_path / name
        open_file = gzip.open if name.endswith(".gz") else open
        with open_file(path, "wt", encoding=encoding, newline="") as file:
            csv.writer(file).writerows([header, *lines])
        return path

    return write


class TestReadOrders:
    def test_reads_the_whole_real_day(self):
        invoices = read_orders(DAY)

        kinds = Counter(invoice.is_cancellation for invoice in invoices)
        assert kinds == {False: 137, True: 6}
        assert sum(len(invoice.rows) for invoice in invoices) == 3108
        assert sum(not invoice.customer for invoice in invoices) == 16

    def test_keeps_the_order_and_the_line_numbers_of_the_file(self, orders_file):
        second = ["536366", "22633", "HAND WARMER", "6", "2010-12-01 08:28:00", "1.85", "", "United Kingdom"]
        path = orders_file(LINE, second, LINE)

        invoices = read_orders(path)

        assert [invoice.number for invoice in invoices] == ["536365", "536366"]
        assert [row.line for row in invoices[0].rows] == [2, 4]

    def test_reads_customers_as_whole_numbers(self, orders_file):
        path = orders_file(LINE)

        invoices = read_orders(path)

        assert invoices[0].customer == "17850"

    def test_reads_gzipped_files(self, orders_file):
        path = orders_file(LINE, name="orders.csv.gz")

        invoices = read_orders(path)

        assert len(invoices) == 1

    def test_reads_files_with_a_byte_order_mark(self, orders_file):
        path = orders_file(LINE, encoding="utf-8-sig")

        invoices = read_orders(path)

        assert len(invoices) == 1

    def test_leaves_what_makes_no_sense_to_the_shop(self, orders_file):
        path = orders_file([*LINE[:3], "many", "yesterday", "cheap", *LINE[6:]])

        invoices = read_orders(path)

        assert (invoices[0].invoiced_at, invoices[0].rows[0].quantity) == ("yesterday", "many")

    def test_says_that_a_file_is_empty(self, tmp_path):
        (tmp_path / "empty.csv").touch()

        with pytest.raises(OrdersFileError, match=r"empty.csv is empty. Its first line must be InvoiceNo,"):
            read_orders(tmp_path / "empty.csv")

    def test_names_the_columns_of_another_format(self, orders_file):
        path = orders_file(LINE, header=["Invoice", *COLUMNS[1:]])

        with pytest.raises(OrdersFileError, match=r"line 1: the columns must be InvoiceNo,.* not Invoice,"):
            read_orders(path)

    def test_names_the_line_that_lacks_a_column(self, orders_file):
        path = orders_file(LINE, LINE[:-1])

        with pytest.raises(OrdersFileError, match="line 3: 7 columns instead of 8"):
            read_orders(path)

    def test_names_the_line_where_an_invoice_changes_its_customer(self, orders_file):
        path = orders_file(LINE, [*LINE[:6], "13047.0", LINE[7]])

        with pytest.raises(OrdersFileError, match="line 3: invoice 536365 is of customer 13047 here, and of 17850 in line 2"):
            read_orders(path)

    def test_says_that_a_file_is_no_utf8(self, orders_file):
        path = orders_file([*LINE[:2], "CAFÉ", *LINE[3:]], encoding="latin-1")

        with pytest.raises(OrdersFileError, match="not UTF-8 text"):
            read_orders(path)

    def test_says_that_a_file_is_missing(self, tmp_path):
        with pytest.raises(OrdersFileError, match="No such file"):
            read_orders(tmp_path / "none.csv")

    def test_says_that_a_file_is_no_gzip(self, tmp_path):
        path = tmp_path / "orders.csv.gz"
        path.write_text("InvoiceNo")

        with pytest.raises(OrdersFileError, match="cannot be read: Not a gzipped file"):
            read_orders(path)

    def test_says_that_a_gzipped_file_is_cut_off(self, orders_file):
        path = orders_file(*[LINE] * 100, name="orders.csv.gz")
        path.write_bytes(path.read_bytes()[:-20])

        with pytest.raises(OrdersFileError, match="cannot be read"):
            read_orders(path)

    def test_says_that_a_file_holds_no_orders(self, orders_file):
        path = orders_file()

        with pytest.raises(OrdersFileError, match="no orders"):
            read_orders(path)
