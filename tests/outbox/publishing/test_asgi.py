"""Async views behind a real ASGI server, whose clients may go away in the middle. docs/how-to/async.md quotes this."""

import asyncio
import socket
import threading
from urllib.request import urlopen

import pytest
import uvicorn
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.core.asgi import get_asgi_application
from django.http import JsonResponse
from django.urls import path

from outbox import apublish, publish_many, transactional
from outbox.models import MessageRow
from tests.outbox.publishing.rows import OrderMade
from tests.quotes import is_quoted, python_blocks
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

seen = {name: threading.Event() for name in ("published", "cancelled")}


@transactional
async def place_order(request):
    group = await Group.objects.acreate(name="staff")
    receipt = await apublish(OrderMade(order_id=group.pk), about=group)
    return JsonResponse({"message": str(receipt.message_id)})


@transactional
async def place_many(request):
    await sync_to_async(publish_many)([OrderMade(order_id=1), OrderMade(order_id=2)])
    return JsonResponse({})


@transactional
async def wait_for_payment(request):
    await Group.objects.acreate(name="staff")
    await apublish(OrderMade(order_id=1))
    seen["published"].set()
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        seen["cancelled"].set()
        raise
    return JsonResponse({})


urlpatterns = [
    path("orders/", place_order),
    path("many/", place_many),
    path("payments/", wait_for_payment),
]


@pytest.fixture
def server():
    """A server in a thread of this process."""
    for event in seen.values():
        event.clear()
    server = uvicorn.Server(uvicorn.Config(get_asgi_application(), port=0, lifespan="off", log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    yield server
    server.should_exit = True
    thread.join()


def port_of(server):
    return server.servers[0].sockets[0].getsockname()[1]


class TestAnAsyncViewBehindAServer:
    @pytest.mark.parametrize(("address", "messages"), [("orders", 1), ("many", 2)])
    def test_commits(self, server, address, messages):
        with urlopen(f"http://127.0.0.1:{port_of(server)}/{address}/") as answer:
            assert answer.status == 200

        assert MessageRow.objects.count() == messages

    def test_rolls_back_when_its_client_goes_away(self, server):
        with socket.create_connection(("127.0.0.1", port_of(server))) as client:
            client.sendall(b"GET /payments/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert seen["published"].wait(10)

        assert seen["cancelled"].wait(10)
        wait_until(lambda: not server.server_state.tasks)
        assert (Group.objects.count(), MessageRow.objects.count()) == (0, 0)


class TestThePageOfAsyncCode:
    @pytest.mark.parametrize("block", python_blocks("how-to/async.md"))
    def test_quotes_code_that_runs(self, block):
        assert is_quoted(block, "tests/outbox/publishing/test_asgi.py", "tests/outbox/consuming/test_handle.py")
