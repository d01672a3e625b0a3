"""Tables of a journey's own, in which its processes write down what they did."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection


@contextmanager
def tables(statements: str) -> Iterator[None]:
    """Create tables, and drop them in the end."""
    with connection.cursor() as cursor:
        cursor.execute(statements)
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE " + ", ".join(re.findall(r"CREATE TABLE (\w+)", statements)))


def rows(statement: str, values: Any = None) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall()
