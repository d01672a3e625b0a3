"""
The generated gRPC stubs of the RocketMQ client, and nothing else of it.

Its own producer repeats sends under one id, cannot be told when to announce itself again, and shares one event loop
among all clients of a process; so requests, loop and check-backs are ours. Source: apache/rocketmq-apis service.proto.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CLIENT_LOGGER = "rocketmq-python-client"


@contextmanager
def _no_log_folder() -> Iterator[None]:
    """Let an import of the client write its logs into a folder that goes away again, not into ~/logs."""
    home = os.environ.get("HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder
        try:
            yield
        finally:
            if home is None:
                del os.environ["HOME"]
            else:
                os.environ["HOME"] = home
            logger = logging.getLogger(CLIENT_LOGGER)
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
                handler.close()
            logger.propagate = True
            logger.setLevel(logging.WARNING)


with _no_log_folder():
    from rocketmq.grpc_protocol import definition_pb2 as definition
    from rocketmq.grpc_protocol import service_pb2 as service
    from rocketmq.grpc_protocol.service_pb2_grpc import MessagingServiceStub

Code = definition.Code

__all__ = ["Code", "MessagingServiceStub", "definition", "service"]
