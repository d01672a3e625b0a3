"""What @transactional(half_first=...) takes: each shape of view, and coroutine functions."""

import asyncio

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.contrib.auth.models import Group
from django.db import connections

from outbox import transactional
from outbox.errors import ConfigurationError
from outbox.models import Batch, State
from tests.outbox.half_first.orders import announce, is_rolled_back, make_group, shown, stored_half

SHAPES = ["made", "method", "whole", "as-view", "api", "async"]


@pytest.mark.urls("tests.outbox.half_first.views")
class TestEachShape:
    @pytest.fixture
    def get(self, client, async_client):
        def get(shape, then="200"):
            asking = async_to_sync(async_client.get) if shape == "async" else client.get
            return asking(f"/{shape}/", {"then": then}).status_code

        return get

    @pytest.mark.parametrize("shape", SHAPES)
    def test_commits(self, get, broker, shape):
        assert get(shape) == 200

        assert Group.objects.count() == len(shown(broker)) == 1
        assert Batch.objects.get().state == State.SENT

    @pytest.mark.parametrize("shape", SHAPES)
    def test_rolls_back_on_the_status_codes_named(self, get, broker, shape):
        assert get(shape, "409") == 409

        assert Group.objects.count() == len(shown(broker)) == 0
        assert is_rolled_back()

    def test_rolls_back_an_exception_that_has_become_a_response(self, get):
        assert get("api", "denied") == 403

        assert Group.objects.count() == 0
        assert is_rolled_back()


class TestACoroutineFunction:
    def test_goes_half_first_in_the_thread_of_its_transaction(self, broker):
        @transactional(half_first=announce)
        async def work(message):
            assert await sync_to_async(lambda: connections["default"].in_atomic_block)()
            await Group.objects.acreate(pk=message.group_id)
            return message.group_id

        async def request():
            async with ThreadSensitiveContext():
                try:
                    return await work()
                finally:
                    await sync_to_async(connections.close_all)()

        key = asyncio.run(request())

        assert Group.objects.get().pk == key
        assert len(shown(broker)) == 1


class TestTheDecorator:
    def test_takes_a_function_that_takes_the_message(self):
        def work(request):
            pass

        with pytest.raises(ConfigurationError, match="work has half_first=announce, but no parameter `message`"):
            transactional(half_first=announce)(work)

    def test_takes_no_coroutine_function_to_build_the_message(self):
        async def build(request):
            pass

        with pytest.raises(ConfigurationError, match="plain function"):
            transactional(half_first=build)(make_group)

    def test_does_not_begin_when_the_message_cannot_be_built(self):
        def build(**kwargs):
            raise LookupError("no such cart")

        @transactional(half_first=build)
        def work(message):
            pytest.fail("the work began")

        with pytest.raises(LookupError):
            work()

        assert stored_half() is None
