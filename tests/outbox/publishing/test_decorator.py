import functools
import inspect

import pytest
from django.contrib.auth.models import Group
from django.db import connection

from outbox import publish, transactional
from outbox.errors import BrokenTransaction, ConfigurationError
from tests.outbox.publishing.rows import OrderMade, message_rows
from tests.outbox.publishing.views import Broken

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.outbox.publishing.views")]

SHAPES = [
    "plain",
    "called",
    "strict",
    "picky",
    "method",
    "whole",
    "whole-called",
    "as-view",
    "api-outside",
    "api-inside",
    "api-method",
    "orders",
    "orders/under",
    "orders/over",
]


@pytest.fixture
def get(client):
    """Ask a view; return the status, or "raised", and whether rows and message are there."""

    def get(shape, then="200"):
        try:
            status = client.get(f"/{shape}/", {"then": then}).status_code
        except (Broken, BrokenTransaction):
            status = "raised"
        assert Group.objects.count() == len(message_rows())
        return status, bool(message_rows())

    return get


@pytest.mark.parametrize("shape", SHAPES)
class TestEachShape:
    def test_commits(self, get, shape):
        assert get(shape) == (200, True)

    def test_rolls_back_on_an_exception(self, get, shape):
        assert get(shape, "broken") == ("raised", False)

    def test_does_not_answer_success_after_a_swallowed_error(self, get, shape):
        """Django rolls back for it without a word, and the view would answer 200 for an order that is not there."""
        assert get(shape, "swallowed") == ("raised", False)

    def test_writes_in_a_transaction_of_its_own(self, client, shape, django_assert_num_queries):
        client.get(f"/{shape}/")  # finds the topic
        Group.objects.all().delete()

        with django_assert_num_queries(4) as queries:
            client.get(f"/{shape}/")

        assert [query["sql"].split()[0] for query in queries] == ["SAVEPOINT", "INSERT", "WITH", "RELEASE"]


class TestARestFrameworkView:
    @pytest.mark.parametrize("shape", ["api-outside", "api-inside", "api-method", "orders", "orders/under", "orders/over"])
    def test_rolls_back_when_its_exception_has_become_a_response(self, get, shape):
        assert get(shape, "denied") == (403, False)

    @pytest.mark.parametrize("shape", ["api-outside", "api-inside", "api-method"])
    def test_commits_a_response_that_says_no(self, get, shape):
        assert get(shape, "403") == (403, True)


class TestAResponse:
    @pytest.mark.parametrize("status", ["400", "404", "500"])
    def test_commits_whatever_its_status(self, get, status):
        assert get("plain", status) == (int(status), True)

    @pytest.mark.parametrize(("status", "is_kept"), [("200", True), ("302", True), ("400", False), ("500", False)])
    def test_rolls_back_on_the_status_codes_named(self, get, status, is_kept):
        assert get("strict", status) == (int(status), is_kept)

    @pytest.mark.parametrize(("status", "is_kept"), [("200", True), ("400", True), ("409", False)])
    def test_rolls_back_as_a_function_says(self, get, status, is_kept):
        assert get("picky", status) == (int(status), is_kept)

    def test_rolls_back_on_the_status_codes_named_for_a_whole_class(self, get):
        assert get("whole-called", "409") == (409, False)


class TestUnderAtomicRequests:
    @pytest.fixture(autouse=True)
    def _atomic_requests(self, monkeypatch):
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_commits(self, get, shape):
        assert get(shape) == (200, True)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_rolls_back_on_an_exception(self, get, shape):
        assert get(shape, "broken") == ("raised", False)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_it_does_not_answer_success_after_a_swallowed_error(self, get, shape):
        assert get(shape, "swallowed") == ("raised", False)

    @pytest.mark.parametrize("shape", ["api-outside", "api-inside", "api-method", "orders"])
    def test_it_rolls_back_when_an_exception_has_become_a_response(self, get, shape):
        assert get(shape, "denied") == (403, False)

    @pytest.mark.parametrize(("then", "expected"), [("200", (200, True)), ("broken", ("raised", False))])
    def test_no_decorator_is_needed(self, get, then, expected):
        assert get("undecorated", then) == expected


@pytest.mark.django_db(databases={"default", "other"})
class TestAnotherDatabase:
    def test_holds_the_transaction(self, client):
        client.get("/elsewhere/")
        with pytest.raises(Broken):
            client.get("/elsewhere/", {"then": "broken"})
        client.get("/elsewhere/", {"then": "409"})

        assert (len(message_rows()), len(message_rows("other"))) == (0, 1)


class TestAPlainFunction:
    def test_gives_what_it_gave_before(self):
        @transactional
        def place(order_id, *, customer="Ann"):
            return publish(OrderMade(order_id=order_id, customer=customer)).key

        assert place(7, customer="Bob") == "7"

    def test_keeps_name_docstring_and_signature(self):
        @transactional
        def place(order_id: int) -> str:
            """Place an order."""

        assert (place.__name__, place.__doc__) == ("place", "Place an order.")
        assert str(inspect.signature(place)) == "(order_id: int) -> str"

    def test_may_give_a_thing_with_an_exception_of_its_own(self):
        class Future:
            exception = True

        @transactional
        def place():
            publish(OrderMade(order_id=1))
            return Future()

        place()

        assert len(message_rows()) == 1

    def test_may_be_a_partial(self):
        def place(order_id):
            publish(OrderMade(order_id=order_id))

        transactional(functools.partial(place, 7))()

        assert len(message_rows()) == 1


class TestWhatItRefuses:
    def test_is_a_class(self):
        with pytest.raises(ConfigurationError, match=r"the class .*Orders\. .*method_decorator\(transactional, name="):

            @transactional
            class Orders:
                pass

    def test_is_a_generator(self):
        with pytest.raises(ConfigurationError, match=r"generator .*rows: its body runs after"):

            @transactional
            def rows():
                yield publish(OrderMade(order_id=1))

    def test_is_an_asynchronous_generator(self):
        with pytest.raises(ConfigurationError, match=r"generator .*rows: its body runs after"):

            @transactional
            async def rows():
                yield 1

    def test_is_a_database_without_its_name(self):
        with pytest.raises(ConfigurationError, match=r"cannot decorate 'other'\. To name a database, pass using="):
            transactional("other")
