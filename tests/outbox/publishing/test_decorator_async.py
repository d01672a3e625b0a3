import asyncio
import gc
import inspect
import threading
from contextvars import ContextVar
from types import CoroutineType

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.contrib.auth.models import Group
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections, transaction

from outbox import apublish, publish, transactional
from outbox import atomic as outbox_atomic
from outbox.errors import ConfigurationError, NotAwaited, NotInTransaction
from outbox.message import Cause, Header, current_cause
from tests.outbox.publishing.rows import OrderMade, bodies, headers_of, message_rows
from tests.outbox.publishing.views import Broken

SHAPES = ["async", "async-picky", "async-method", "async-as-view"]


def run(coroutine_function):
    """Run a coroutine as an ASGI server runs a request: a loop, and a thread for all that is synchronous."""

    async def request():
        async with ThreadSensitiveContext():
            try:
                return await coroutine_function()
            finally:
                await sync_to_async(connections.close_all)()

    return asyncio.run(request())


@pytest.mark.django_db
@pytest.mark.urls("tests.outbox.publishing.views")
class TestAnAsyncView:
    @pytest.fixture
    def get(self, async_client):
        """Ask a view; return the status, or "raised", and how many messages there are."""

        def get(shape, then="200"):
            try:
                status = async_to_sync(async_client.get)(f"/{shape}/", {"then": then}).status_code
            except Broken:
                status = "raised"
            assert 2 * Group.objects.count() == len(message_rows())
            return status, len(message_rows())

        return get

    @pytest.mark.parametrize("shape", SHAPES)
    def test_commits(self, get, shape):
        assert get(shape) == (200, 2)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_rolls_back_on_an_exception(self, get, shape):
        assert get(shape, "broken") == ("raised", 0)

    def test_rolls_back_on_the_status_codes_named(self, get):
        assert get("async-picky", "409") == (409, 0)
        assert get("async-picky", "400") == (400, 2)


@pytest.mark.django_db(transaction=True)
class TestACoroutineFunction:
    def test_commits_in_the_thread_of_its_request(self):
        loop_thread = threading.current_thread()

        @transactional
        async def place():
            assert threading.current_thread() is loop_thread
            assert await sync_to_async(lambda: connection.in_atomic_block)()
            await Group.objects.acreate(name="staff")
            return (await apublish(OrderMade(order_id=1))).key

        assert run(place) == "1"
        assert len(message_rows()) == Group.objects.count() == 1

    def test_rolls_back_on_an_exception(self):
        @transactional
        async def place():
            await Group.objects.acreate(name="staff")
            await apublish(OrderMade(order_id=1))
            raise Broken

        with pytest.raises(Broken):
            run(place)

        assert len(message_rows()) == Group.objects.count() == 0

    def test_rolls_back_when_it_is_cancelled(self):
        published = asyncio.Event()

        @transactional
        async def place():
            await apublish(OrderMade(order_id=1))
            published.set()
            await asyncio.Event().wait()

        async def impatient():
            task = asyncio.create_task(place())
            await published.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not await sync_to_async(lambda: connection.in_atomic_block)()

        run(impatient)

        assert message_rows() == []

    def test_opens_a_savepoint_within_another(self):
        @transactional
        async def inner(number):
            await apublish(OrderMade(order_id=number))
            if number == 2:
                raise Broken

        @transactional
        async def outer():
            await inner(1)
            with pytest.raises(Broken):
                await inner(2)
            await apublish(OrderMade(order_id=3))

        run(outer)

        assert [body["order_id"] for body in bodies()] == [1, 3]

    def test_may_publish_side_by_side(self):
        @transactional
        async def place():
            await asyncio.gather(*(apublish(OrderMade(order_id=n)) for n in range(10)))

        run(place)

        assert len(message_rows()) == 10

    def test_may_run_side_by_side_in_one_request(self):
        @transactional
        async def place(number):
            await asyncio.sleep(0)
            await apublish(OrderMade(order_id=number))
            if number == 1:
                raise Broken

        async def both():
            return await asyncio.gather(place(1), place(2), return_exceptions=True)

        failed, _ = run(both)

        assert isinstance(failed, Broken)
        assert [body["order_id"] for body in bodies()] == [2]

    def test_has_the_context_of_its_caller_and_gives_it_back(self):
        seen = ContextVar("seen", default="nothing")

        @transactional
        async def place():
            receipt = await apublish(OrderMade(order_id=1))
            seen.set("the inner")
            return receipt

        async def caused():
            current_cause.set(Cause("the-cause", "the-story"))
            return await place(), seen.get()

        receipt, seen_after = run(caused)

        assert headers_of(receipt)[Header.CAUSATION_ID] == "the-cause"
        assert seen_after == "the inner"

    def test_runs_in_a_synchronous_caller_too(self):
        @transactional
        async def place():
            await apublish(OrderMade(order_id=1))
            raise Broken

        with outbox_atomic():
            with pytest.raises(Broken):
                async_to_sync(place)()
            assert message_rows() == []

    @pytest.mark.django_db(transaction=True, databases={"default", "other"})
    def test_publishes_to_the_database_of_its_transaction(self):
        @transactional(using="other")
        async def place():
            await apublish(OrderMade(order_id=1))

        run(place)

        assert (len(message_rows()), len(message_rows("other"))) == (0, 1)


@pytest.mark.django_db
class TestACoroutineThatIsHidden:
    """It would begin when its transaction has ended, and change the database without it."""

    def test_is_refused_behind_another_decorator(self):
        async def place():
            await Group.objects.acreate(name="staff")

        hidden = transactional(lambda: place())

        with pytest.raises(ConfigurationError, match=r"<lambda> returned a coroutine, .* right above the `async def`"):
            hidden()

    @pytest.mark.urls("tests.outbox.publishing.views")
    def test_is_refused_behind_dispatch_by_django(self, async_client):
        with pytest.raises(SynchronousOnlyOperation):
            async_to_sync(async_client.get)("/async-dispatch/")

        assert message_rows() == []

    @pytest.mark.urls("tests.outbox.publishing.views")
    def test_is_refused_by_rest_framework(self, client):
        with pytest.raises(AssertionError, match="Expected a `Response`"):
            client.get("/api-async/")

        assert message_rows() == []
        for one in gc.get_objects():
            if type(one) is CoroutineType and one.__qualname__ == "AsyncApi.get":
                one.close()  # nobody awaited it


@pytest.mark.django_db(transaction=True)
class TestApublish:
    def test_takes_all_that_publish_takes(self):
        assert inspect.signature(apublish).parameters == inspect.signature(publish).parameters

    def test_joins_a_transaction_of_its_thread(self):
        async def publish_it():
            return await apublish(OrderMade(order_id=1), tag="late")

        with transaction.atomic():
            receipt = async_to_sync(publish_it)()

        assert headers_of(receipt)[Header.TAG] == "late"

    def test_raises_where_no_thread_holds_a_transaction(self):
        async def publish_it():
            await apublish(OrderMade(order_id=1))

        with pytest.raises(NotInTransaction):
            run(publish_it)

    def test_is_named_by_publish_in_a_coroutine(self):
        @transactional
        async def place():
            publish(OrderMade(order_id=1))

        with pytest.raises(NotInTransaction, match=r"`await apublish\(\.\.\.\)`"):
            run(place)

    def test_raises_in_another_thread(self):
        @transactional
        async def place():
            await sync_to_async(publish, thread_sensitive=False)(OrderMade(order_id=1))

        with pytest.raises(NotInTransaction):
            run(place)

    def test_is_not_helped_by_a_block_in_a_coroutine(self):
        async def place():
            with outbox_atomic():
                await apublish(OrderMade(order_id=1))

        with pytest.raises(SynchronousOnlyOperation):
            run(place)

    def test_raises_in_a_task_that_outlives_the_transaction(self):
        tasks = []

        @transactional
        async def place():
            gate = asyncio.Event()

            async def late():
                await gate.wait()
                await apublish(OrderMade(order_id=1))

            tasks.append((gate, asyncio.create_task(late())))

        async def both():
            await place()
            ((gate, task),) = tasks
            gate.set()
            with pytest.raises((NotInTransaction, RuntimeError)):
                await task

        run(both)

        assert message_rows() == []


@pytest.mark.django_db(transaction=True)
class TestACallThatIsNotAwaited:
    async def forget(self):
        apublish(OrderMade(order_id=1))

    async def leave_in_a_task(self):
        self.task = asyncio.create_task(self.publish_later())
        await asyncio.sleep(0)

    async def publish_later(self):
        call = apublish(OrderMade(order_id=1))
        await asyncio.sleep(60)
        await call

    @staticmethod
    def forget_in_a_block(name):
        with outbox_atomic():
            Group.objects.create(name=name)
            apublish(OrderMade(order_id=1))

    @pytest.mark.parametrize("way", ["forget", "leave_in_a_task"])
    def test_rolls_back_and_says_so(self, way):
        @transactional
        async def work():
            await Group.objects.acreate(name="staff")
            await getattr(self, way)()

        with pytest.raises(NotAwaited, match="called once and not awaited"):
            run(work)

        assert Group.objects.count() == len(message_rows()) == 0

    def test_is_refused_in_synchronous_code_in_djangos_own_block_too(self):
        with transaction.atomic(), pytest.raises(NotAwaited, match=r"in synchronous code.* Call publish\(\) there"):
            apublish(OrderMade(order_id=1))

    def test_rolls_back_in_synchronous_code_too(self):
        with pytest.raises(NotAwaited):
            self.forget_in_a_block("staff")

        assert Group.objects.count() == len(message_rows()) == 0

    def test_rolls_back_no_more_than_the_block_that_it_is_in(self):
        with outbox_atomic():
            Group.objects.create(name="staff")
            with pytest.raises(NotAwaited):
                self.forget_in_a_block("other")

        assert [group.name for group in Group.objects.all()] == ["staff"]
