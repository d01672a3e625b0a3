"""Lengths of bodies that are none, on the servers that a project may stand behind."""

import asyncio
import io
import socket
import threading
import time

import pytest
import uvicorn
from django.core.asgi import get_asgi_application
from django.core.handlers.wsgi import WSGIHandler
from django.urls import reverse

from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ADDRESS = reverse("outbox:check-back")
LENGTHS = {
    "a word": b"Content-Length: abc\r\n",
    "negative": b"Content-Length: -5\r\n",
    "two numbers": b"Content-Length: 5, 7\r\n",
    "digits of others": "Content-Length: ²\r\n".encode("latin-1"),
    "a float": b"Content-Length: 1.5\r\n",
    "too large": b"Content-Length: 99999999999999999999999999\r\n",
    "very many digits": b"Content-Length: " + b"9" * 5000 + b"\r\n",
    "empty": b"Content-Length: \r\n",
    "absent": b"",
    "chunked": b"Transfer-Encoding: chunked\r\n",
}


@pytest.fixture(scope="module")
def asgi_server():
    server = uvicorn.Server(uvicorn.Config(get_asgi_application(), port=0, lifespan="off", log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[:2]
    server.should_exit = True
    thread.join()


@pytest.fixture(params=["runserver", "asgi"])
def server(request):
    """Where a server listens: Django's own, as `runserver` has it, or an ASGI server."""
    if request.param == "asgi":
        return request.getfixturevalue("asgi_server")
    thread = request.getfixturevalue("live_server").thread
    return thread.host, thread.port


def signed_by_nobody():
    return {"webhook-id": "msg_1", "webhook-timestamp": str(int(time.time())), "webhook-signature": "v1,bm9ib2R5"}


def status_of(server, length, headers):
    lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
    request = f"POST {ADDRESS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n".encode()
    with socket.create_connection(server, timeout=10) as client:
        client.sendall(request + lines + length + b"\r\n" + (b"2\r\n{}\r\n0\r\n\r\n" if b"chunked" in length else b""))
        return int(client.makefile("rb").readline().split()[1])


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
class TestALengthThatIsNone:
    @pytest.mark.parametrize("headers", [{}, signed_by_nobody()], ids=["unsigned", "wrongly signed"])
    def test_is_refused_by_the_servers(self, server, length, headers):
        assert 400 <= status_of(server, length, headers) < 500


@pytest.mark.parametrize("value", ["abc", "-5", "1.5", "²", "", " 5", "9" * 5000, "5,7"])
class TestALengthThatNoServerHasLookedAt:
    def test_is_refused_under_wsgi(self, value):
        statuses = []
        names = {f"HTTP_{name.upper().replace('-', '_')}": text for name, text in signed_by_nobody().items()}
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": ADDRESS, "SERVER_NAME": "localhost", "SERVER_PORT": "80"}
        environ |= {"CONTENT_LENGTH": value, "wsgi.input": io.BytesIO(b"{}"), "wsgi.url_scheme": "http", **names}

        WSGIHandler()(environ, lambda status, headers: statuses.append(int(status[:3])))

        assert 400 <= statuses[0] < 500

    def test_is_refused_under_asgi(self, value):
        sent = []
        headers = [(name.encode(), text.encode()) for name, text in signed_by_nobody().items()]
        headers += [(b"content-length", value.encode("latin-1", "replace")), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": ADDRESS,
            "query_string": b"",
            "headers": headers,
            "http_version": "1.1",
        }

        bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive():
            return bodies.pop() if bodies else await asyncio.get_running_loop().create_future()

        async def send(message):
            sent.append(message)

        asyncio.run(get_asgi_application()(scope, receive, send))

        assert 400 <= sent[0]["status"] < 500
