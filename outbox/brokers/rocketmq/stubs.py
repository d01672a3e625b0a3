"""
The generated gRPC stubs of the RocketMQ client, and nothing else of it.

The client's own producer repeats sends under one id, cannot be told when to register again, and shares one event loop among
all clients of a process. The adapter therefore has its own requests, event loop and check-backs.
Source: apache/rocketmq-apis service.proto.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

# The client opens a log file in ~/logs by the module of this name. This one replaces it, unless it is loaded already.
_log_config = ModuleType("rocketmq.v5.log.log_config")
_log_config.logger = logging.getLogger("rocketmq-python-client")  # type: ignore[attr-defined]
sys.modules.setdefault(_log_config.__name__, _log_config)

from rocketmq.grpc_protocol import definition_pb2 as definition  # noqa: E402
from rocketmq.grpc_protocol import service_pb2 as service  # noqa: E402
from rocketmq.grpc_protocol.service_pb2_grpc import MessagingServiceStub  # noqa: E402

Code = definition.Code

__all__ = ["Code", "MessagingServiceStub", "definition", "service"]
