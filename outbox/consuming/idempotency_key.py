"""
Idempotence for effects outside the database: a key in Redis records that an effect has happened, or is in progress.

    once = RedisIdempotencyKey(redis.Redis.from_url(settings.REDIS_URL))

    @consumer(OrderPlaced, group="mail")
    def send_confirmation(message, context):
        with once(context.idempotency_key) as is_first:
            if is_first:
                send_mail(...)

This is weaker than the inbox, whose row is committed together with the effect. If a process dies between the effect and the end
of the block, the key expires, and the effect happens again. It also happens again if Redis loses the key (no fsync, a failover,
eviction). If the other service accepts an idempotency key, pass `context.idempotency_key` to that service instead.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from outbox.errors import RetryLater

if TYPE_CHECKING:  # the caller passes a client, so this module does not need the package
    from redis import Redis

DONE = "done"  # the value of a key whose effect has happened; FINISH writes it

# Record that the effect has happened, unless another process has taken the key over. KEYS[1]: the key. ARGV: the value that the
# holder has set, and the milliseconds after which the record expires.
FINISH = """
local held = redis.call('GET', KEYS[1])
if held == false or held == ARGV[1] then redis.call('SET', KEYS[1], 'done', 'PX', ARGV[2]) return 1 end
return 0
"""

# Delete the key if it still has the value that its holder has set. KEYS[1]: the key. ARGV[1]: that value.
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class RedisIdempotencyKey:
    """
    Lets one of several processes do something that must happen once; the others skip it after it is done.

    Args:
        held: how long a process holds a key. It must be longer than the effect takes. After that time
            another process may take the key, since the holder has probably died.
        kept: how long a finished effect is remembered. It must be longer than the time within which a message may be redelivered.
        prefix: the beginning of the names of the keys in Redis.
    """

    def __init__(
        self,
        client: Redis,
        *,
        held: timedelta = timedelta(minutes=1),
        kept: timedelta = timedelta(days=7),
        prefix: str = "outbox:token:",
    ) -> None:
        self._client = client
        self._held = held
        self._kept = kept
        self._prefix = prefix

    @contextmanager
    def __call__(self, key: str) -> Iterator[bool]:
        """
        Take a key; yield True if the caller has to perform the effect, False if it has happened before.

        An exception in the block deletes the key, so that the next delivery can take it.

        Raises:
            RetryLater: another process holds the key. The message is retried when the key will have expired.
            redis.RedisError: Redis cannot be reached; the message is retried.
        """
        name, holder = f"{self._prefix}{key}", uuid.uuid4().hex
        if not self._take(name, holder):
            yield False
            return
        try:
            yield True
        except BaseException:
            self._client.eval(RELEASE, 1, name, holder)
            raise
        self._client.eval(FINISH, 1, name, holder, _milliseconds(self._kept))

    def _take(self, name: str, holder: str) -> bool:
        """Take the key (SET NX), otherwise raise RetryLater; return False if the effect has happened before."""
        if self._client.set(name, holder, nx=True, px=_milliseconds(self._held)):
            return True
        held = self._read(name)
        if held == holder:  # the first SET took the key; its reply was lost, so the client has repeated it
            return True
        if held == DONE:
            return False
        remaining = timedelta(milliseconds=max(1, self._client.pttl(name)))
        raise RetryLater(remaining, f"Key {name} is held by another process, for {remaining.total_seconds():.1f} s at most.")

    def _read(self, name: str) -> str | None:
        """Return a key's value as a string, whether or not the client decodes responses; None if the key does not exist."""
        held = self._client.get(name)
        return held.decode() if isinstance(held, bytes) else held


def _milliseconds(duration: timedelta) -> int:
    return max(1, round(duration.total_seconds() * 1000))
