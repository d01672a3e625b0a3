"""What the database holds, and the one right answer to each question about it."""

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from outbox.message import Half, Token
from outbox.models import MessageRow, State
from tests.factories import BatchFactory, MessageRowFactory, TopicFactory, message_id
from tests.outbox.check_backs.halves import source_of

FUNCTIONS = {"committed-elsewhere": "COMMIT", "rolled-back-elsewhere": "ROLLBACK", "unknown-elsewhere": "UNKNOWN"}
"""Topics of other producers, with what their `@check_back` functions say."""

LONG = timedelta(hours=1)


@dataclass
class Known:
    """
    A half message that the database can say something about.

    Args:
        says: the answer to the question about it as it is.
        of_another_half: the answer when the question names another half id.
        of_an_older_attempt: the answer to the half of the attempt before; None where there was none.
    """

    half: Half
    says: str
    of_another_half: str
    of_an_older_attempt: str | None = None


@dataclass
class World:
    """The database's half messages. `tombstones`: messages that never came, and were asked about."""

    chance: random.Random
    known: list[Known] = field(default_factory=list)
    tombstones: set[UUID] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.source = source_of()
        self.topic = TopicFactory(name="orders")
        for _ in range(6):
            self._add_batches()
            self._add_half_first()
        self.rows_before = MessageRow.objects.count()

    def _add_batches(self) -> None:
        decided = {"half_ids": ["h1", "h2", "h3"], "size": 3, "attempt": 2}
        for state in (State.PREPARED, State.SENT):
            self._add(BatchFactory(topic=self.topic, state=state, **decided), "COMMIT", "ROLLBACK")
            under_way = BatchFactory(topic=self.topic, state=state, ends_until=datetime.now(UTC) + LONG, **decided)
            self._add(under_way, "UNKNOWN", "ROLLBACK")
            self._add(BatchFactory(topic=self.topic, state=state, split=[1, 2, 3], **decided), "ROLLBACK", "ROLLBACK")
        for state in (State.RELEASED, State.DEAD, State.DISCARDED):
            self._add(BatchFactory(topic=self.topic, state=state, size=3, attempt=2), "ROLLBACK", "ROLLBACK")
        alive = BatchFactory(topic=self.topic, size=3, attempt=2, lease_until=datetime.now(UTC) + LONG)
        self._add(alive, "UNKNOWN", "UNKNOWN")
        self._add(BatchFactory(topic=self.topic, size=3, attempt=2, lease_until=datetime.now(UTC) - LONG), "ROLLBACK", "ROLLBACK")

    def _add(self, batch: object, says: str, of_another_half: str) -> None:
        for position, number in enumerate(batch.message_ids, 1):  # type: ignore[attr-defined]
            half_id = (batch.half_ids or ["", "", ""])[position - 1] or "h"  # type: ignore[attr-defined]
            token = Token(self.source, batch.id, 2, position)  # type: ignore[attr-defined]
            self.known.append(Known(Half("orders", str(number), half_id, str(token)), says, of_another_half, "ROLLBACK"))

    def _add_half_first(self) -> None:
        token = str(Token(self.source, 0, 1, 1))
        for state, says in ((State.PREPARED, "COMMIT"), (State.SENT, "COMMIT"), (State.DEAD, "ROLLBACK")):
            batch = BatchFactory(topic=self.topic, state=state, half_ids=["h"])
            self.known.append(Known(Half("orders", str(batch.message_ids[0]), "h", token), says, "ROLLBACK"))
        tombstone = MessageRowFactory(topic_id=0, body=b"")
        self.known.append(Known(Half("orders", str(tombstone.id), "h", token), "ROLLBACK", "ROLLBACK"))
        waiting = MessageRowFactory(topic=self.topic)
        self.known.append(Known(Half("orders", str(waiting.id), "h", token), "UNKNOWN", "UNKNOWN"))

    def question(self) -> tuple[Half, str]:
        """Make a question; return it with the right answer."""
        kinds = [self._as_it_is, self._changed, self._never_came, self._elsewhere, self._lost]
        (kind,) = self.chance.choices(kinds, weights=[5, 4, 1, 1, 1])
        return kind(self.chance.choice(self.known))

    def known_question(self) -> tuple[Half, str]:
        """Make a question about one of the half messages that the database knows."""
        return self._as_it_is(self.chance.choice(self.known))

    def allows(self, asked: dict[str, object], answer: str) -> bool:
        """
        Return whether an answer does no harm, whatever was asked: only what was committed is committed, and nothing of it, nor
        what may be committed yet, is rolled back. A tombstone that was written is counted.
        """
        token = str(asked.get("token", ""))
        if not token:
            return answer == FUNCTIONS.get(str(asked["topic"]), "UNKNOWN")
        exact = [one for one in self.known if self._is_about(one, asked, token)]
        if any(one.says != answer for one in exact):
            return False
        if answer == "ROLLBACK" and not exact and self._went_first(token):
            self._count_tombstone(str(asked["message_id"]))
        return answer != "COMMIT" or bool(exact)

    def _is_about(self, one: Known, asked: dict[str, object], token: str) -> bool:
        try:
            is_its_token = Token.parse(token) == Token.parse(one.half.token)
        except ValueError:
            return False
        return is_its_token and (asked["message_id"], asked["half_id"]) == (one.half.message_id, one.half.half_id)

    def _went_first(self, token: str) -> bool:
        return Token.parse(token).is_half_first

    def _count_tombstone(self, number: str) -> None:
        if not any(UUID(number) == UUID(one.half.message_id) for one in self.known):
            self.tombstones.add(UUID(number))

    def _as_it_is(self, one: Known) -> tuple[Half, str]:
        return one.half, one.says

    def _changed(self, one: Known) -> tuple[Half, str]:
        """Change one thing about a half message."""
        half = one.half
        token = Token.parse(half.token)
        changes = [
            *[(half.message_id, "another", half.token, one.of_another_half)] * 4,
            (half.message_id, half.half_id, str(Token("urn:uuid:another", token.batch, 1, 1)), "UNKNOWN"),
            (half.message_id, half.half_id, half.token[:-2], "UNKNOWN"),
            (half.message_id, half.half_id, f"{half.token}x", "UNKNOWN"),
            (half.message_id, half.half_id, str(Token(self.source, 2**62, 1, 1)), "UNKNOWN"),
            ("no id of ours", half.half_id, half.token, "UNKNOWN"),
        ]
        if not token.is_half_first:
            changes += [
                (str(message_id()), half.half_id, half.token, "UNKNOWN"),
                (half.message_id, half.half_id, str(Token(self.source, token.batch, 3, token.position)), "UNKNOWN"),
                (half.message_id, half.half_id, str(Token(self.source, token.batch, 2, token.position % 3 + 1)), "UNKNOWN"),
                (half.message_id, half.half_id, str(Token(self.source, token.batch, 2, 10**12)), "UNKNOWN"),
                (half.message_id, half.half_id, str(Token(self.source, token.batch, 1, token.position)), "ROLLBACK"),
            ]
        number, half_id, text, answer = self.chance.choice(changes)
        return Half("orders", number, half_id, text), answer

    def _never_came(self, one: Known) -> tuple[Half, str]:
        """Ask about a message that went half first and whose transaction wrote nothing: of today, or of no time that is kept."""
        token = str(Token(self.source, 0, 1, 1))
        if self.chance.random() < 0.5:
            number = message_id()
            self.tombstones.add(number)
            return Half("orders", str(number), "h", token), "ROLLBACK"
        beyond = [UUID(int=0), UUID(int=2**128 - 1), UUID(int=self.chance.getrandbits(128) | 1 << 127)]
        beyond += [message_id(datetime.now(UTC) + self.chance.choice([timedelta(hours=2), timedelta(days=-9)]))]
        return Half("orders", str(self.chance.choice(beyond)), "h", token), "UNKNOWN"

    def _elsewhere(self, one: Known) -> tuple[Half, str]:
        """Ask about a half message of another producer."""
        topic = self.chance.choice([*FUNCTIONS, "orders", "Müller & Söhne 🙂"])
        return Half(topic, f"theirs {self.chance.random()}", "h"), FUNCTIONS.get(topic, "UNKNOWN")

    def _lost(self, one: Known) -> tuple[Half, str]:
        """Ask about a batch that is not there."""
        token = Token(self.source, self.chance.randrange(2**40, 2**63), 1, 1)
        return Half("orders", str(message_id()), "h", str(token)), "UNKNOWN"
