"""
Idempotence for effects outside the database: a key in Redis records that an effect has happened, or is in progress.

    once = RedisIdempotencyKey(redis.Redis.from_url(settings.REDIS_URL))

    @consumer(OrderPlaced, group="mail")
    def send_confirmation(message, context):
        with once(context.idempotency_key) as is_first:
            if is_first:
                send_mail(...)

This is weaker than the inbox, whose row commits together with the effect. If a process dies between the effect and the end of
the block, the key expires and the effect happens again. The same holds when Redis loses the key (no fsync, a failover, eviction).
Where the other service accepts an idempotency key itself, pass it `context.idempotency_key` instead.
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

# Record that the effect has happened, unless another process took the key over. KEYS: key; ARGV: the holder's value,
# milliseconds.
FINISH = """
local held = redis.call('GET', KEYS[1])
if held == false or held == ARGV[1] then redis.call('SET', KEYS[1], 'done', 'PX', ARGV[2]) return 1 end
return 0
"""

# Delete the key if it still has the holder's value. KEYS: key; ARGV: the holder's value.
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class RedisIdempotencyKey:
    """
    Lets one of several processes have an effect; the others skip it once it is done.

    Args:
        held: after this time another process may take over the key of a process that has died. It must be longer than the effect
            takes.
        kept: how long a finished effect is remembered. It must be longer than the time after which a message may be redelivered.
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
        Take a key; yield True if the caller has to do the work, False if it was done before.

        An exception in the block deletes the key, so that the next delivery can take it.

        Raises:
            RetryLater: another process holds the key. The message is retried when the key has expired.
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
        """Take the key (SET NX); return False if the effect has happened before."""
        if self._client.set(name, holder, nx=True, px=_milliseconds(self._held)):
            return True
        held = self._read(name)
        if held == holder:  # the client has repeated a SET whose reply was lost
            return True
        if held == DONE:
            return False
        remaining = timedelta(milliseconds=max(1, self._client.pttl(name)))
        raise RetryLater(remaining, f"Key {name} is held by another process, for {remaining.total_seconds():.1f} s at most.")

    def _read(self, name: str) -> str | None:
        """Return a key's value, whether the client decodes responses or not."""
        held = self._client.get(name)
        return held.decode() if isinstance(held, bytes) else held


def _milliseconds(duration: timedelta) -> int:
    return max(1, round(duration.total_seconds() * 1000))
