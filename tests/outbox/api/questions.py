"""What a broker posts."""

from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict

from outbox.message import Half

STRANGE = Half("orders", "of another producer", "h", born_at=datetime.now(UTC))


def question_of(half: Half, **changes: Any) -> dict[str, Any]:
    fields = asdict(half)
    del fields["headers"], fields["body"]
    return fields | {"born_at": half.born_at and half.born_at.isoformat()} | changes
