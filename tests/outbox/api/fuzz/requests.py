"""Requests as anybody may send them."""

import base64
import hashlib
import hmac
import io
import json
import random
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from django.urls import reverse

from outbox.message import Half
from tests.check_back_secrets import OTHER_SECRET, SECRET

ADDRESS = reverse("outbox:check-back")

ODD_TEXTS = [
    "",
    " ",
    "\x00",
    "\n",
    "\ud800",
    "é",
    "\u202e",
    "x" * 300,
    "%00",
    "v1,",
    "-1",
    "0",
    "1e9",
    "9" * 5000,
    "nan",
    "٣",
    "½",
    "a,b",
]
ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    1.5,
    1e300,
    "",
    "x" * 300,
    "\0",
    "\ud800",
    [],
    {},
    [[]],
    {"a": 1},
]
METHODS = ["GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "post"]
CONTENT_TYPES = [
    *("", "text/plain", "application/xml", "multipart/form-data", "multipart/form-data; boundary=x"),
    *("application/x-www-form-urlencoded", "application/json; charset=utf-16", "application/json;;;=", "*/*", "é", "x" * 5000),
]


@dataclass
class Request:
    """What a server would hand on. `headers` by their names in WSGI's environment."""

    body: bytes
    headers: dict[str, str]
    method: str = "POST"
    query: str = ""
    path: str = ADDRESS

    def environ(self) -> dict[str, Any]:
        environ = {"REQUEST_METHOD": self.method, "PATH_INFO": self.path, "QUERY_STRING": self.query, "SERVER_NAME": "localhost"}
        environ |= {
            "SERVER_PORT": "80",
            "REMOTE_ADDR": "203.0.113.7",
            "wsgi.input": io.BytesIO(self.body),
            "wsgi.url_scheme": "http",
        }
        return environ | {"CONTENT_TYPE": "application/json", "CONTENT_LENGTH": str(len(self.body))} | self.headers


def signature(request_id: str, at: int, body: bytes, secret: str = SECRET) -> str:
    """Sign by hand: our library signs no body that is not UTF-8."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return "v1," + base64.b64encode(hmac.digest(key, f"{request_id}.{at}.".encode() + body, hashlib.sha256)).decode()


def signed(request_id: str, body: bytes) -> Request:
    """Make a request that is signed right, now."""
    now = int(time.time())
    headers = {"HTTP_WEBHOOK_ID": request_id, "HTTP_WEBHOOK_TIMESTAMP": str(now)}
    return Request(body, headers | {"HTTP_WEBHOOK_SIGNATURE": signature(request_id, now, body)})


def body_of(half: Half, **changes: Any) -> bytes:
    fields = {"topic": half.topic, "message_id": half.message_id, "half_id": half.half_id, "token": half.token}
    return json.dumps(fields | changes).encode()


def spoil_signature(request: Request, chance: random.Random) -> Request:
    """Make of a request that is signed right one that is not."""
    headers = request.headers
    request_id, at = headers["HTTP_WEBHOOK_ID"], int(headers["HTTP_WEBHOOK_TIMESTAMP"])
    stale = at + chance.choice([-400, 400, -(10**9)])
    headers |= chance.choice(
        [
            {"HTTP_WEBHOOK_SIGNATURE": signature(request_id, at, request.body, OTHER_SECRET)},
            {"HTTP_WEBHOOK_SIGNATURE": signature(request_id, at, request.body + b" ")},
            {"HTTP_WEBHOOK_SIGNATURE": headers["HTTP_WEBHOOK_SIGNATURE"].replace("v1,", "v2,")},
            {"HTTP_WEBHOOK_SIGNATURE": headers["HTTP_WEBHOOK_SIGNATURE"][:-5]},
            {"HTTP_WEBHOOK_SIGNATURE": " ".join(["v1,x"] * 500)},
            {"HTTP_WEBHOOK_SIGNATURE": chance.choice(ODD_TEXTS)},
            {"HTTP_WEBHOOK_ID": f"{request_id}x"},
            {"HTTP_WEBHOOK_ID": chance.choice([one for one in ODD_TEXTS if one != "\n"])},
            {"HTTP_WEBHOOK_TIMESTAMP": str(at + 1)},
            {"HTTP_WEBHOOK_TIMESTAMP": str(stale), "HTTP_WEBHOOK_SIGNATURE": signature(request_id, stale, request.body)},
            {"HTTP_WEBHOOK_TIMESTAMP": chance.choice(ODD_TEXTS)},
        ]
    )
    return request


def unsigned(chance: random.Random) -> Request:
    """Make a request as strangers send it: anything at all, but a signature."""
    body = chance.choice([b"", b"{}", b"[" * 2000, b"\xff" * 100, chance.randbytes(chance.randrange(200)), b"x" * 70_000])
    headers = {
        "CONTENT_LENGTH": chance.choice([str(len(body)), str(len(body)), *(one for one in ODD_TEXTS if one != "\ud800")]),
        "CONTENT_TYPE": chance.choice(CONTENT_TYPES),
        "HTTP_ACCEPT": chance.choice([*["*/*"] * 9, "text/html", "application/xml", "é", ",,;q=x", "x" * 2000]),
        "HTTP_COOKIE": chance.choice(["", "sessionid=x", "csrftoken=\x00", ";;=" * 100]),
        "HTTP_X_FORWARDED_FOR": chance.choice(["", "1.1.1.1\r\nx: y", "::1"]),
        "HTTP_TRANSFER_ENCODING": chance.choice(["", "chunked", "gzip"]),
    }
    if chance.random() < 0.5:  # as if signed
        headers |= {
            "HTTP_WEBHOOK_ID": "msg_1",
            "HTTP_WEBHOOK_TIMESTAMP": str(int(time.time())),
            "HTTP_WEBHOOK_SIGNATURE": "v1,eA==",
        }
    method = chance.choice(METHODS) if chance.random() < 0.3 else "POST"
    query = chance.choice([*[""] * 9, "format=xml", "format=api", "%00", quote("\x00é"), "a=" * 500])
    return Request(body, headers, method, query)


def odd_body(half: Half, chance: random.Random) -> bytes:
    """Make a body that is no question: of JSON's own shapes, broken, or with one field that is wrong."""
    right = body_of(half)
    depth = chance.choice([1, 10, 1000, 15_000])
    field = chance.choice(["topic", "message_id", "half_id", "token", "asked", "born_at", "key"])
    return chance.choice(
        [
            b"[" * depth + b"]" * depth,
            b'{"topic":' * (depth // 4 + 1) + b"1" + b"}" * (depth // 4 + 1),
            right[: chance.randrange(1, len(right) - 1)],
            right[:-1] + b', "topic": "orders"}',
            right[:-1] + b', "asked": NaN}',
            right[:-1] + b', "asked": ' + b"9" * chance.choice([11, 5000]) + b"}",
            right.decode().encode("utf-16"),
            b"\xef\xbb\xbf" + right,
            right.replace(b'"', b"'"),
            right.replace(b"orders", b"\xff\xfe"),
            right + right,
            chance.randbytes(50),
            *[json.dumps(value).encode() for value in ODD_VALUES],
            *[body_of(half, **{field: value}) for value in ODD_VALUES],
        ]
    )


def flipped(half: Half, chance: random.Random) -> bytes:
    """Change a few bytes of a question, so that it may still be one."""
    body = bytearray(body_of(half))
    for _ in range(chance.randrange(1, 4)):
        body[chance.randrange(len(body))] = chance.choice([*range(0x20, 0x7F)])
    return bytes(body)
