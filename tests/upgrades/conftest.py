"""An empty database."""

from tests.journeys.conftest import fresh_database

__all__ = ["fresh_database"]
