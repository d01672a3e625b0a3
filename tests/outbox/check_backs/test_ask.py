import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.error import HTTPError

import pytest
from django.db import connections
from django.urls import reverse
from standardwebhooks import Webhook, WebhookVerificationError

from outbox.check_backs import ask as ask_module
from outbox.check_backs.ask import in_process, over_http, probe
from outbox.check_backs.register import check_back
from outbox.database import loop_errors
from outbox.errors import ConfigurationError
from outbox.message import COMMIT, UNKNOWN, Half
from outbox.models import CheckBack, State
from tests.check_back_secrets import OTHER_SECRET, SECRET
from tests.factories import BatchFactory
from tests.outbox.check_backs.halves import half_of

HALF = Half("orders", "m-1", "h-1", "source:17:1:1", asked=2, born_at=datetime(2026, 1, 1, tzinfo=UTC), key="4711")
COMMITTED = b'{"answer": "COMMIT", "reason": "", "about": "none"}'


class TestOverHttp:
    def test_brings_the_answer(self, endpoint):
        endpoint.answer = 200, COMMITTED

        assert over_http(endpoint.url, SECRET)(HALF) is COMMIT

    def test_says_all_about_the_half_and_signs_it(self, endpoint):
        over_http(endpoint.url, SECRET)(HALF)

        headers, body = endpoint.asked[0]
        assert Webhook(SECRET).verify(body, headers) == {
            "topic": "orders",
            "message_id": "m-1",
            "half_id": "h-1",
            "token": "source:17:1:1",
            "asked": 2,
            "born_at": "2026-01-01T00:00:00+00:00",
            "key": "4711",
        }

    def test_gives_each_question_an_id_of_its_own(self, endpoint):
        ask = over_http(endpoint.url, SECRET)

        ask(HALF)
        ask(HALF)

        assert len({headers["Webhook-Id"] for headers, _ in endpoint.asked}) == 2

    @pytest.mark.parametrize(
        "answer",
        [
            (200, b'{"answer": "UNKNOWN"}'),
            (200, b'{"answer": "commit"}'),
            (200, b'{"answer": "COMMIT "}'),
            (200, b'{"answer": ["COMMIT"]}'),
            (200, b'{"answer": null}'),
            (200, b'{"resolution": "COMMIT"}'),
            (200, b'"COMMIT"'),
            (200, b"COMMIT"),
            (200, b""),
            (201, COMMITTED),
            (401, COMMITTED),
            (429, COMMITTED),
            (500, COMMITTED),
            (503, COMMITTED),
            (302, b"/elsewhere"),
            (307, b"/elsewhere"),
        ],
    )
    def test_takes_everything_else_for_unknown(self, endpoint, answer):
        endpoint.answer = answer

        assert over_http(endpoint.url, SECRET)(HALF) is UNKNOWN

    def test_takes_silence_for_unknown(self, silent_port, monkeypatch):
        monkeypatch.setattr(ask_module, "TIMEOUT", timedelta(milliseconds=100))
        ask = over_http(f"http://127.0.0.1:{silent_port}/", SECRET)

        assert ask(HALF) is UNKNOWN

    def test_takes_nobody_there_for_unknown(self):
        assert over_http("http://127.0.0.1:1/", SECRET)(HALF) is UNKNOWN

    def test_notes_that_nobody_is_there_until_there_is_an_answer(self, endpoint):
        over_http("http://127.0.0.1:1/", SECRET)(HALF)
        away = loop_errors.read("relay", "default", "default")
        over_http(endpoint.url, SECRET)(HALF)

        [text] = away.values()
        assert text.startswith("The check-back endpoint http://127.0.0.1:1/ cannot be reached: ConnectionRefusedError")
        assert loop_errors.read("relay", "default", "default") == {}

    @pytest.mark.parametrize(
        ("status", "says"),
        [
            (404, 'answered 404 Not Found. Add path("outbox/", include("outbox.api.urls")) to the urlpatterns there, or correct'),
            (403, 'answered 403 Forbidden. Let requests to OUTBOX["CHECK_BACK"]["URL"] pass without a login'),
            (401, "answered 401 Unauthorized. Its SECRETS need the secret that signs"),
            (302, "answered 302 Found. Redirects are not followed"),
            (500, "answered 500 Internal Server Error. See the log of its web server"),
            (200, "did not answer as a check-back endpoint does: JSONDecodeError: Expecting value"),
        ],
    )
    def test_says_what_the_endpoint_did_instead_and_what_to_do(self, endpoint, caplog, status, says):
        endpoint.answer = status, b"/elsewhere"

        over_http(endpoint.url, SECRET)(HALF)

        assert f"Message m-1: The check-back endpoint {endpoint.url} {says}" in caplog.text
        assert 'OUTBOX["CHECK_BACK"]' in caplog.text

    def test_says_that_nobody_is_there(self, caplog):
        over_http("http://127.0.0.1:1/", SECRET)(HALF)

        assert "http://127.0.0.1:1/ cannot be reached: ConnectionRefusedError: [Errno 111] Connection refused." in caplog.text
        assert 'Start its web server, or correct OUTBOX["CHECK_BACK"]["URL"].' in caplog.text

    def test_goes_past_a_proxy_of_the_environment(self, endpoint, monkeypatch):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        endpoint.answer = 200, COMMITTED

        assert over_http(endpoint.url, SECRET)(HALF) is COMMIT

    @pytest.mark.parametrize("url", ["", "ftp://x/", "file:///etc/hostname", "/outbox/check-back/"])
    def test_refuses_an_address_that_is_not_http(self, url):
        with pytest.raises(ConfigurationError, match="http://"):
            over_http(url, SECRET)

    @pytest.mark.parametrize("secret", ["", "whsec_", "whsec_a", "whsec_" + "Zm9v*" * 20, "whsec_é"])
    def test_refuses_a_secret_that_is_none(self, secret):
        with pytest.raises(ConfigurationError, match="whsec_"):
            over_http("http://127.0.0.1/", secret)

    @pytest.mark.parametrize("length", [1, 24, 31])
    def test_refuses_a_secret_that_is_short(self, length):
        with pytest.raises(ConfigurationError, match=f"has {length} bytes; at least 32 are required"):
            over_http("http://127.0.0.1/", f"whsec_{b64encode(bytes(length)).decode()}")

    def test_takes_a_secret_without_prefix_and_padding(self):
        assert over_http("http://127.0.0.1/", b64encode(bytes(32)).decode().rstrip("="))

    def test_is_understood_by_the_endpoint(self, settings, live_server):
        settings.OUTBOX = {"CHECK_BACK": {"SECRETS": [SECRET]}}
        half = half_of(BatchFactory(state=State.SENT, half_ids=["h"]))

        resolution = over_http(live_server.url + reverse("outbox:check-back"), SECRET)(half)

        assert resolution is COMMIT
        assert CheckBack.objects.get().asked_by == "endpoint"


class TestProbe:
    def test_is_answered_by_each_secret_of_the_endpoint(self, settings, live_server):
        settings.OUTBOX = {"CHECK_BACK": {"SECRETS": [OTHER_SECRET, SECRET]}}

        for secret in (SECRET, OTHER_SECRET):
            probe(live_server.url + reverse("outbox:check-back"), secret)

    @pytest.mark.parametrize("status", [200, 400, 404])
    @pytest.mark.parametrize(
        "body", [b"", b"welcome", b"[]", b"{}", b'{"probe": true}', b'{"signature": 7}', b'{"signature": "v1,eA=="}']
    )
    def test_takes_no_other_servers_answer(self, endpoint, status, body):
        endpoint.answer = status, body

        with pytest.raises((HTTPError, LookupError, TypeError, AttributeError, ValueError, WebhookVerificationError)):
            probe(endpoint.url, SECRET)

    def test_takes_no_echo_of_its_own_signature(self, endpoint):
        endpoint.reply_to = lambda headers: json.dumps({"signature": headers["Webhook-Signature"]}).encode()

        with pytest.raises(WebhookVerificationError):
            probe(endpoint.url, SECRET)


@pytest.mark.django_db(transaction=True)
class TestInProcess:
    def test_reads_the_database_itself(self):
        half = half_of(BatchFactory(state=State.SENT, half_ids=["h"]))

        assert in_process("default")(half) is COMMIT
        assert CheckBack.objects.get().asked_by == "broker"

    @pytest.mark.usefixtures("resolvers")
    def test_gives_functions_a_connection_that_works_again_after_a_restart_of_the_database(self):
        @check_back("orders")
        def did_it_commit(half):
            CheckBack.objects.exists()
            return COMMIT

        connections["default"].ensure_connection()
        connections["default"].connection.close()
        half = Half("orders", "of another producer", "h")

        assert [in_process("default")(half) for _ in range(2)][-1] is COMMIT


class Endpoint(HTTPServer):
    """Answers every question the same way and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.answer = 200, b'{"answer": "UNKNOWN"}'
        self.asked = []
        self.reply_to = None


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.asked.append((dict(self.headers), self.rfile.read(int(self.headers["content-length"]))))
        status, body = self.server.answer
        self.reply(status, self.server.reply_to(self.headers) if self.server.reply_to else body)

    def do_GET(self):
        self.reply(200, COMMITTED)

    def reply(self, status, body):
        self.send_response(status)
        if status in (302, 307):
            self.send_header("location", body.decode())
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
