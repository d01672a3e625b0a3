"""Routers as Django's documentation has them."""

from typing import Any


class ReplicaRouter:
    """All reads go to a replica, those of the outbox too, of which check W021 warns."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_relation(self, *objects: Any, **hints: Any) -> bool:
        return True

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db == "default"


class ShopElsewhere:
    """The shop and the broker's messages have a database of their own, the rest stays in `default`."""

    ELSEWHERE = {"shop", "outbox", "outbox_embedded"}

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label in self.ELSEWHERE else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return (db == "other") == (app_label in self.ELSEWHERE)
