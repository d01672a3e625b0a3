"""The backend's classes; Django requires them in a module of this name."""

from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    """Raises an error with the next steps instead of connecting."""

    def get_new_connection(self, conn_params: dict[str, Any]) -> NoReturn:
        raise ImproperlyConfigured(
            "The shop needs a PostgreSQL database and DATABASE_URL is not set. Set it "
            "(DATABASE_URL=postgresql://user:password@host/name), or run the command on a throw-away server: "
            "python -m outbox.testing.postgres -- python manage.py ..."
        )
