"""Prepare a database after its migrations."""

from __future__ import annotations

from outbox.database import connect, ensure_fit, has_outbox_tables, is_outbox_database, raw
from outbox.database.identity import adopt
from outbox.database.partitions import create_partitions
from outbox.errors import NotMigrated, OtherProject
from outbox.logs import get_logger
from outbox.topics import write_topics

logger = get_logger(__name__)


def prepare_database(*, using: str, **kwargs: object) -> None:
    """
    Record the project that the tables belong to, write topic rows, and create the coming daily partitions of the message table.

    This is called after every `migrate`, also of other apps. After `migrate outbox zero` there are no tables.
    """
    if is_outbox_database(using) and has_outbox_tables(using):
        adopt(raw(using))
        try:
            with connect(using) as separate:  # a separate connection, since a signal may change the search_path of Django's
                ensure_fit(using, separate)
        except (NotMigrated, OtherProject) as error:
            logger.error(str(error))
            return
        write_topics(using)
        create_partitions(using)
