"""Messages as another program may write them: 200 good ones, and between them some of each odd kind, by a seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

JSON = b"application/json"
TYPE = b"shop.Noted"
CALENDAR = (-1, 0, 1, 253_402_300_800_000, 1_700_000_000_000_000, 10**18, 2**63 - 1)  # milliseconds, and what is taken for them
TEXTS = (
    b"", b"\0", b"a\0b", b"\xff\xfe", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", "\N{SNOWMAN}\u202e\ufeff".encode(),
    b"\r\n\t \x1f\x7f", b"{}", b"%s %(a)s {0}", b"'; DROP TABLE outbox_inbox; --", b"x" * 250, b"-1", b"NaN", b"1e999",
    "\u0663".encode(), "\u00b2".encode(), b"9" * 5000, b"2" * 19,
    b"00000000-0000-0000-0000-000000000000", b"1970-01-01T00:00:00Z", b"urn:uuid:", b"*",
)  # fmt: skip
BODIES = (
    b"", b"\0", b"{", b"\xff\0", b"[" * 20_000, b"1" * 5000, b"1e9999", b"NaN", b'"\\ud800"', b'{"a": 1, "a": 2}',
    b"\xef\xbb\xbf{}", '"\N{SNOWMAN}"'.encode("utf-16"), b'"\\u0000"', b"null", b"[]", b"\x1f\x8b\x08\0", b"x\x9c",
    b"y" * 200_000,
)  # fmt: skip
OURS = (
    "ce-id", "ce-source", "ce-type", "ce-time", "ce-subject", "ce-specversion", "ce-typeversion", "ce-tag", "ce-about", "ce-lane",
    "ce-number", "ce-token", "ce-deliverat", "ce-correlationid", "ce-causationid", "content-type", "traceparent", "outbox-key",
    "outbox-tag", "outbox-id", "outbox-token", "outbox-headers", "outbox-stored-at", "outbox-unreadable", "outbox-destination",
    "x-death", "x-delivery-count", "x-acquired-count", "x-first-death-queue", "tracestate", "baggage",
)  # fmt: skip


@dataclass(slots=True)
class Foreign:
    """
    A message of another program, in no protocol yet.

    Args:
        mark: text in its body, which tells it from all others; "" where the body has no room for it.
        headers: by name, CloudEvents' with `ce-`.
        time: milliseconds since 1970.
    """

    kind: str
    mark: str
    topic: str
    headers: dict[bytes, bytes]
    body: bytes | None
    key: bytes = b""
    tag: bytes = b""
    time: int | None = None
    expiration: str = ""
    priority: int | None = None

    def text(self) -> str:
        """Return it so that a person can repeat it."""
        body = self.body or b""
        return f"{self.mark} {self.kind}: {self.topic} {self.headers} {body!r} {self.key!r} {self.tag!r} {self.time}"[:800]


def good(number: int, topics: Sequence[str]) -> Foreign:
    """Return a message that all of its topic's handlers can read."""
    mark = f"good {number}."
    headers = {b"ce-id": mark.encode(), b"ce-type": TYPE, b"content-type": JSON, b"ce-source": b"https://good.example"}
    key = f"good-{number % 7}".encode()
    return Foreign("good", mark, topics[number % 2], headers, b'{"text": "%s"}' % mark.encode(), key)


def odd(seed: int, number: int, topics: Sequence[str]) -> Foreign:
    """Return an odd message, always the same of a seed and a number."""
    random = Random(f"{seed} {number}")
    mark = f"odd {number}."
    headers = {b"ce-id": mark.encode(), b"content-type": JSON}
    if random.random() < 0.5:
        headers[b"ce-type"] = TYPE
    kind = random.choice(list(KINDS))
    made = Foreign(kind, mark, random.choice(topics), headers, b'{"text": "%s"}' % mark.encode(), f"odd-{number % 9}".encode())
    KINDS[kind](made, random)
    return made


def _text(random: Random) -> bytes:
    return random.choice(TEXTS) if random.random() < 0.8 else random.randbytes(random.randrange(300))


def _set(*names: str) -> Callable[[Foreign, Random], None]:
    """Return what gives one of some headers an odd value."""

    def change(made: Foreign, random: Random) -> None:
        made.headers[random.choice(names).encode()] = _text(random)

    return change


def _id(made: Foreign, random: Random) -> None:
    made.headers[b"ce-id"] = random.choice((b"%s", b"\0%s", b"\xff%s", b"%s" + b"i" * 200, b"%s\n\r")).replace(
        b"%s", made.mark.encode()
    )


def _no_id(made: Foreign, random: Random) -> None:
    made.headers.pop(b"ce-id", None)


def _no_headers(made: Foreign, random: Random) -> None:
    made.headers.clear()


def _many_headers(made: Foreign, random: Random) -> None:
    made.headers |= {b"h%d" % n: _text(random)[:200] for n in range(255)}


def _names(made: Foreign, random: Random) -> None:
    made.headers |= {(_text(random)[:120] or b"n") + b"%d" % n: _text(random) for n in range(random.randrange(1, 5))}


def _body(made: Foreign, random: Random) -> None:
    made.body = b'"%s"' % made.mark.encode() + (random.choice(BODIES) or random.randbytes(200))


def _whole_body(made: Foreign, random: Random) -> None:
    made.body, made.mark = random.choice((*BODIES, None)), ""


def _content_type(made: Foreign, random: Random) -> None:
    types = (
        b"",
        b"application/xml",
        b"APPLICATION/JSON",
        b"application/json; charset=utf-16",
        b"application/jsonl",
        b"\xff",
        b"a\0b",
    )
    made.headers[b"content-type"] = random.choice(types)


def _type(made: Foreign, random: Random) -> None:
    made.headers[b"ce-type"] = random.choice((b"shop.Unknown", b"a\0b", b"\xff", b"t" * 6000, b"shop.Noted\0"))


def _misfit(made: Foreign, random: Random) -> None:
    made.headers[b"ce-type"], made.headers[b"ce-typeversion"] = (
        TYPE,
        random.choice((b"0", b"1", b"2", b"9" * 9, b"9" * 5000, b"-1")),
    )
    made.body = b'{"text": ["%s"]}' % made.mark.encode()


def _source(made: Foreign, random: Random) -> None:
    made.headers[b"ce-source"] = random.choice((b"s" * 6000, b"a\0b", b"urn:uuid:nonsense", b"\xff", b"https://other.example"))


def _numbers(made: Foreign, random: Random) -> None:
    for name in (b"ce-lane", b"ce-number", b"ce-typeversion", b"x-delivery-count", b"outbox-stored-at"):
        made.headers[name] = random.choice((b"0", b"1", b"32768", b"9" * 19, b"9" * 4301, b"9" * 5000, b"-7", "\u0663".encode()))


def _key(made: Foreign, random: Random) -> None:
    made.key = random.choice((_text(random), random.randbytes(8), b"\0" * 8, b"k" * 5000))


def _tag(made: Foreign, random: Random) -> None:
    made.tag = _text(random)[:255]


def _time(made: Foreign, random: Random) -> None:
    made.time = random.choice(CALENDAR)


def _ends(made: Foreign, random: Random) -> None:
    made.expiration, made.priority = random.choice(("", "1", "3600000")), random.choice((0, 9, 255))


def _all(made: Foreign, random: Random) -> None:
    for change in random.sample([change for kind, change in KINDS.items() if kind != "all at once"], 5):
        change(made, random)


KINDS: dict[str, Callable[[Foreign, Random], None]] = {
    "id": _id,
    "no id": _no_id,
    "no headers": _no_headers,
    "255 headers": _many_headers,
    "names of headers": _names,
    "our own headers": _set(*OURS),
    "ce-* of no standard": _set("ce-", "ce-ID", "ce-dataschema", "ce-x\0y", "ce-\N{SNOWMAN}", "ce_id"),
    "numbers": _numbers,
    "source": _source,
    "type": _type,
    "body that does not fit": _misfit,
    "body behind JSON": _body,
    "odd or empty body, tombstone": _whole_body,
    "content type": _content_type,
    "key": _key,
    "tag": _tag,
    "time": _time,
    "expiration, priority": _ends,
    "correlation, trace": _set("ce-correlationid", "ce-causationid", "traceparent", "tracestate"),
    "all at once": _all,
}
