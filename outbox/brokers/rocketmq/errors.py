"""Errors of a proxy, and their description."""

from __future__ import annotations

from typing import Any

import grpc


class StatusError(Exception):
    """Raised when the server answers with a status that is not OK."""

    def __init__(self, status: Any) -> None:
        super().__init__(f"{status.code} {status.message}".strip())
        self.code = int(status.code)
        self.text = str(status.message)


def is_outage(error: BaseException) -> bool:
    """Return whether the server or the connection caused an error; if so, logs need no traceback."""
    return isinstance(error, (grpc.aio.AioRpcError, StatusError, ConnectionError))


def describe(error: BaseException) -> str:
    """Return an error as text for logs and findings."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
