"""
Idempotence for effects outside the database: a token in Redis says that an effect was had, or is being had.

    once = RedisIdempotencyKey(redis.Redis.from_url(settings.REDIS_URL))

    @consumer(OrderPlaced, group="mail")
    def send_confirmation(message, context):
        with once(context.idempotency_key) as is_first:
            if is_first:
                send_mail(...)

Weaker than the inbox, whose row commits together with the effect. Who dies between the effect and the end of the block
leaves a token that runs out, and the effect is had again; a Redis that forgets (no fsync, a failover, eviction) has it had
again, too. Where the other side takes an idempotency key itself, give it `context.idempotency_key` and need no token.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from outbox.errors import RetryLater

if TYPE_CHECKING:  # the extra redis; whoever makes a token has it
    from redis import Redis

DONE = "done"

# Say that the effect was had, unless another took the token over, who is having it again. KEYS: token; ARGV: mine, ms.
FINISH = """
local held = redis.call('GET', KEYS[1])
if held == false or held == ARGV[1] then redis.call('SET', KEYS[1], 'done', 'PX', ARGV[2]) return 1 end
return 0
"""

# Give the token up, if it is still mine.
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class RedisIdempotencyKey:
    """
    Has one of several holders do something; the others pass it by, once it is done.

    Args:
        held: a holder that has died is waited for that long. Longer than the effect ever takes.
        kept: a token of something done is remembered that long. Longer than a message may be redelivered.
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
        Take a token; give whether the effect is the caller's to have. False: it was had.

        An exception in the block gives the token up: the next delivery takes it.

        Raises:
            RetryLater: another holds it. The message comes again, when that one is done or its time is over.
            redis.RedisError: Redis cannot be asked; the message is retried.
        """
        name, mine = f"{self._prefix}{key}", uuid.uuid4().hex
        if not self._take(name, mine):
            yield False
            return
        try:
            yield True
        except BaseException:
            self._client.eval(RELEASE, 1, name, mine)
            raise
        self._client.eval(FINISH, 1, name, mine, _milliseconds(self._kept))

    def _take(self, name: str, mine: str) -> bool:
        """Take the token (SET NX); False where the effect was had."""
        if self._client.set(name, mine, nx=True, px=_milliseconds(self._held)):
            return True
        held = self._read(name)
        if held == mine:  # the client repeated a SET whose answer was lost
            return True
        if held == DONE:
            return False
        left = timedelta(milliseconds=max(1, self._client.pttl(name)))
        raise RetryLater(left, f"Token {name} is held by another, for {left.total_seconds():.1f} s at most.")

    def _read(self, name: str) -> str | None:
        """Read a token, whether the client decodes or not."""
        held = self._client.get(name)
        return held.decode() if isinstance(held, bytes) else held


def _milliseconds(duration: timedelta) -> int:
    return max(1, round(duration.total_seconds() * 1000))
