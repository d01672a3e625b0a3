"""
The generated gRPC stubs of the Python client of RocketMQ. Nothing else of that client is used.

Its producer retries a send under the same id, gives no control over when it registers again, and shares one event loop among
all clients of a process. This package therefore has its own requests, event loop and check-backs.
Source: apache/rocketmq-apis service.proto.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

# The client's module `log_config` opens a log file in ~/logs. Replace the module, unless it is loaded already.
_log_config = ModuleType("rocketmq.v5.log.log_config")
_log_config.logger = logging.getLogger("rocketmq-python-client")  # type: ignore[attr-defined]
sys.modules.setdefault(_log_config.__name__, _log_config)

from rocketmq.grpc_protocol import definition_pb2 as definition  # noqa: E402
from rocketmq.grpc_protocol import service_pb2 as service  # noqa: E402
from rocketmq.grpc_protocol.service_pb2_grpc import MessagingServiceStub  # noqa: E402

Code = definition.Code

__all__ = ["Code", "MessagingServiceStub", "definition", "service"]
