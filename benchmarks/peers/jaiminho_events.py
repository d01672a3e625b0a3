"""The function whose calls are stored."""

from typing import Any

from jaiminho.send import save_to_outbox

from benchmarks.peers import sink


@save_to_outbox
def order_created(order: dict[str, Any]) -> None:
    sink.take(order["id"])
