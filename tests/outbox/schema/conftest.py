from collections.abc import Callable, Mapping
from typing import Any

import pytest

from outbox import message
from outbox.message import Message
from outbox.schema import snapshot
from outbox.schema.changes import Change, changes

Define = Callable[..., type[Message]]


@pytest.fixture(autouse=True)
def _own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.message.registered", {})


@pytest.fixture
def define() -> Define:
    """Define a message type with these fields and options; again, with others, as the next release does."""

    def define(
        name: str = "OrderPlaced",
        fields: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        upgrades: tuple[int, ...] = (),
        **meta: Any,
    ) -> type[Message]:
        options = {"topic": "orders", "key": "order_id", **meta}
        body = {
            "__module__": "shop.messages",
            "__annotations__": dict(fields or {"order_id": int}),
            "Meta": type("Meta", (), options),
        }
        kind = type(Message)(name, (Message,), {**body, **(defaults or {})}, kw_only=True)
        for version in upgrades:
            kind.upgrade_from(version)(dict)
        return kind  # type: ignore[return-value]

    return define


@pytest.fixture
def changed() -> Callable[..., list[Change]]:
    """Return what has changed between two releases, each given as what it defines."""

    def changed(*releases: Callable[[], object]) -> list[Change]:
        taken = []
        for release in releases:
            message.registered.clear()
            release()
            taken.append(snapshot.take(message.registered))
        return changes(taken[0], taken[1], message.registered)

    return changed
