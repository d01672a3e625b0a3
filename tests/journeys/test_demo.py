"""The whole demo, as a person runs it: real processes, killed with SIGKILL."""

import csv
import json
import signal
import urllib.request

import pytest

from project.shop.orders_file import COLUMNS
from tests.journeys.demos import Demo
from tests.waiting import wait_until


@pytest.fixture(scope="class")
def played(tmp_path_factory):
    """A demo that has been played to its end."""
    demo = Demo(tmp_path_factory.mktemp("demo"), "--json")
    demo.finish()
    return demo


@pytest.fixture
def few_orders(tmp_path_factory):
    """A file of five orders, the first of them 536365."""
    path = tmp_path_factory.mktemp("orders") / "orders.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for number in range(536365, 536370):
            writer.writerow([number, "85123A", "HEART", "6", "2010-12-01 08:26:00", "2.55", "17850.0", "United Kingdom"])
    return path


@pytest.mark.timeout(120)
class TestTheDemo:
    def test_keeps_the_promise(self, played):
        assert played.process.returncode == 0, played.stderr

        report = json.loads(played.stdout)
        assert (report["lost"], report["ghosts"], report["applied_twice"]) == (0, 0, 0)
        assert report["missing"] == []

    def test_prints_one_line_of_json(self, played):
        assert len(played.stdout.splitlines()) == 1

    def test_does_all_the_orders_of_the_day(self, played):
        report = json.loads(played.stdout)

        assert report["orders"] + report["rolled_back"] == 127  # of 137: 10 have no good line
        assert (report["cancellations"], report["refused_lines"]) == (6, 10)
        assert report["published"] == 2 * report["orders"] + 6  # each order is shipped
        assert report["rolled_back"] >= 3

    def test_kills_relays_and_consumers(self, played):
        kills = json.loads(played.stdout)["kills_by"]

        assert kills["long_running"] >= 2
        assert kills["celery"] >= 2
        assert kills["long_running"] + kills["celery"] >= 5
        assert kills["unacked"] >= 5

    def test_has_half_messages_decided_by_check_backs(self, played):
        answers = json.loads(played.stdout)["check_backs"]

        assert answers["commit"] >= 3
        assert answers["rollback"] >= 3

    def test_has_the_inbox_drop_what_comes_again(self, played):
        report = json.loads(played.stdout)

        assert (
            report["duplicates_dropped"] > 0
        )  # a kill behind a deferred message's commit leaves none: it was acknowledged before
        assert report["redelivered"] > report["duplicates_dropped"]

    def test_leaves_nothing_behind(self, played):
        assert played.left_behind() == (0, 0, 0)


@pytest.mark.timeout(120)
class TestADemoThatLosesSomething:
    def test_says_so_and_fails(self, few_orders, tmp_path):
        demo = Demo(tmp_path, "--json", "--no-kills", "--orders", str(few_orders))
        demo.sabotage()

        assert demo.finish() == 1

        assert demo.stdout, demo.stderr
        assert json.loads(demo.stdout)["lost"] == 1
        assert "BROKEN" in demo.stderr


@pytest.mark.timeout(120)
class TestADemoThatIsStopped:
    @pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_leaves_nothing_behind(self, signum, code, tmp_path):
        demo = Demo(tmp_path)
        wait_until(lambda: demo.processes() > 5, seconds=30)
        demo.process.send_signal(signum)

        assert demo.finish() == code

        assert demo.left_behind() == (0, 0, 0)


class TestADemoWithAWrongFile:
    def test_names_the_line(self, tmp_path):
        path = tmp_path / "orders.csv"
        path.write_text("InvoiceNo,StockCode\n")
        demo = Demo(tmp_path, "--orders", str(path))

        assert demo.finish() == 1

        assert f"{path} line 1: the columns must be InvoiceNo,StockCode,Description" in demo.stderr


@pytest.mark.timeout(120)
class TestServe:
    def test_keeps_the_admin_open_until_it_is_stopped(self, few_orders, tmp_path):
        demo = Demo(tmp_path, "--serve", "--no-kills", "--orders", str(few_orders), "--port", "8760")
        address, login = "", ""
        for line in demo.process.stdout:
            if line.startswith("Admin:"):
                _, address, login = line.split(maxsplit=2)
                break

        assert "password" in login, demo.process.stderr.read()
        with urllib.request.urlopen(f"{address}login/") as answer:  # noqa: S310
            page = answer.read().decode()
        demo.process.send_signal(signal.SIGINT)
        assert demo.finish() == 0
        assert "Log in" in page
        assert demo.left_behind() == (0, 0, 0)
