"""A gRPC proxy that answers as it is told, for what a real server cannot be made to say. It stores nothing."""

import queue
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from rocketmq.grpc_protocol import service_pb2_grpc

from outbox.brokers.rocketmq.stubs import Code, definition, service
from outbox.message import TopicSpec, TopicType

HOST = "127.0.0.1"
KINDS = [definition.MessageType.NORMAL, definition.MessageType.FIFO, definition.MessageType.TRANSACTION]

Answer = Callable[[Any, Any], Any]


class Stub(service_pb2_grpc.MessagingServiceServicer):
    """
    One proxy. All goes well with it until it is told otherwise.

    Args:
        certificate: speak TLS with it; its key is in key.pem beside it.
    """

    def __init__(self, port: int = 0, certificate: Path | None = None) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, str]] = []
        self._told: dict[str, Answer] = {}
        self.listeners: list[queue.Queue[Any]] = []
        self._numbers = count(1)
        self.put: defaultdict[str, queue.Queue[Any]] = defaultdict(queue.Queue)  # topic -> messages to be handed out
        self.failing: dict[str, tuple[grpc.StatusCode, str]] = {}  # topic -> the error to which requests for messages come
        self._server = grpc.server(ThreadPoolExecutor(40), options=[("grpc.so_reuseport", 0)])
        if certificate is None:
            self.port = self._server.add_insecure_port(f"{HOST}:{port}")
        else:
            pair = (certificate.with_name("key.pem").read_bytes(), certificate.read_bytes())
            self.port = self._server.add_secure_port(f"{HOST}:{port}", grpc.ssl_server_credentials([pair]))
        self.brokers = [self]  # those that routes name
        service_pb2_grpc.add_MessagingServiceServicer_to_server(self, self._server)
        self._server.start()

    @property
    def endpoints(self) -> str:
        return f"{HOST}:{self.port}"

    def stop(self) -> None:
        for listener in self.listeners:
            listener.put(None)
        self._server.stop(None).wait()

    def say(self, name: str, code: int, text: str = "", *, times: float = float("inf")) -> None:
        """Answer a call with a status, so many times; then all goes well again."""
        self._tell(name, lambda request, context: _answer(name, code, text), times)

    def say_of_the_message(self, code: int) -> None:
        """Answer sends with a status that stands at the message alone."""
        self._tell("SendMessage", lambda request, context: _sent(code, "", 0, whole=Code.MULTIPLE_RESULTS), float("inf"))

    def fail(self, name: str, code: grpc.StatusCode, text: str = "", *, times: float = float("inf")) -> None:
        """Answer a call with an error of gRPC's."""
        self._tell(name, lambda request, context: context.abort(code, text), times)

    def freeze(self, name: str, *, then: Callable[[], None] | None = None, times: float = float("inf")) -> None:
        """Take a call and do not answer it; do something meanwhile."""
        gone = threading.Event()

        def wait(request: Any, context: Any) -> Any:
            context.add_callback(gone.set)
            if then is not None:
                then()
            gone.wait(30)
            return _answer(name, Code.OK, "")

        self._tell(name, wait, times)

    def insist_on_time(self, seconds: float) -> None:
        """Refuse a send whose signature was made that long ago, or in the future."""

        def look(request: Any, context: Any) -> Any:
            at = dict(context.invocation_metadata())["x-mq-date-time"]
            age = datetime.now(UTC) - datetime.strptime(at, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            code = Code.UNAUTHORIZED if abs(age.total_seconds()) > seconds else Code.OK
            return _answer("SendMessage", code, "the time of the signature is too far from mine")

        self._tell("SendMessage", look, float("inf"))

    def recover(self, name: str) -> None:
        """Remove the faults of a call."""
        self._told.pop(name, None)

    def asked(self, name: str) -> list[Any]:
        """Return the requests of a call."""
        return [request for one, request in list(self.requests) if one == name]

    def sent(self) -> list[Any]:
        """Return the messages that came in."""
        return [request.messages[0] for request in self.asked("SendMessage")]

    def ask(self, message: Any, *, transaction_id: str = "t") -> bool:
        """Ask whoever listens how a half message ends; say whether somebody does."""
        command = definition_command(message, transaction_id)
        for listener in self.listeners:
            listener.put(command)
        return bool(self.listeners)

    def _tell(self, name: str, answer: Answer, times: float) -> None:
        left = [times]
        counting = threading.Lock()

        def once(request: Any, context: Any) -> Any:
            with counting:
                left[0] -= 1
                is_counted = left[0] >= 0
                if left[0] <= 0:
                    self._told.pop(name, None)
            return answer(request, context) if is_counted else None

        self._told[name] = once

    def _take(self, name: str, request: Any, context: Any) -> Any | None:
        self.requests.append((name, request))
        self.metadata.append(dict(context.invocation_metadata()))
        told = self._told.get(name)
        return told(request, context) if told else None

    # The calls, by the names that the protocol gives them.

    def QueryRoute(self, request: Any, context: Any) -> Any:
        queues = [
            definition.MessageQueue(
                topic=request.topic,
                id=number,
                permission=definition.Permission.READ_WRITE,
                accept_message_types=KINDS,
                broker=definition.Broker(name=f"broker-{'abc'[place]}", endpoints=_endpoints(broker.port)),
            )
            for place, broker in enumerate(self.brokers)
            for number in range(2)
        ]
        well = service.QueryRouteResponse(status=_status(Code.OK), message_queues=queues)
        return self._take("QueryRoute", request, context) or well

    def SendMessage(self, request: Any, context: Any) -> Any:
        return self._take("SendMessage", request, context) or _answer("SendMessage", Code.OK, "", next(self._numbers))

    def EndTransaction(self, request: Any, context: Any) -> Any:
        return self._take("EndTransaction", request, context) or _answer("EndTransaction", Code.OK, "")

    def ReceiveMessage(self, request: Any, context: Any) -> Iterator[Any]:
        """Hand out what is put for the topic; wait for it as long as the request may."""
        self._take("ReceiveMessage", request, context)
        topic = request.message_queue.topic.name
        if topic in self.failing:
            context.abort(*self.failing[topic])
        try:
            message = self.put[topic].get(timeout=request.long_polling_timeout.ToMilliseconds() / 1000)
        except queue.Empty:
            yield service.ReceiveMessageResponse(status=_status(Code.MESSAGE_NOT_FOUND))
        else:
            yield service.ReceiveMessageResponse(message=message)
            yield service.ReceiveMessageResponse(status=_status(Code.OK))

    def AckMessage(self, request: Any, context: Any) -> Any:
        return self._take("AckMessage", request, context) or _answer("AckMessage", Code.OK, "")

    def ChangeInvisibleDuration(self, request: Any, context: Any) -> Any:
        renewed = f"renewed {request.receipt_handle}"
        well = service.ChangeInvisibleDurationResponse(status=_status(Code.OK), receipt_handle=renewed)
        return self._take("ChangeInvisibleDuration", request, context) or well

    def Heartbeat(self, request: Any, context: Any) -> Any:
        return self._take("Heartbeat", request, context) or _answer("Heartbeat", Code.OK, "")

    def Telemetry(self, requests: Any, context: Any) -> Iterator[Any]:
        out: queue.Queue[Any] = queue.Queue()
        context.add_callback(lambda: out.put(None))

        def read() -> None:
            with suppress(grpc.RpcError, ValueError):
                for request in requests:
                    answer = self._take("Telemetry", request, context)
                    out.put(answer or service.TelemetryCommand(status=_status(Code.OK), settings=request.settings))
                    if not answer and out not in self.listeners:
                        self.listeners.append(out)

        threading.Thread(target=read, daemon=True).start()
        while (command := out.get()) is not None:
            yield command
        if out in self.listeners:
            self.listeners.remove(out)


def definition_command(message: Any, transaction_id: str) -> Any:
    question = service.RecoverOrphanedTransactionCommand(message=message, transaction_id=transaction_id)
    return service.TelemetryCommand(recover_orphaned_transaction_command=question)


def _answer(name: str, code: int, text: str, number: int = 0) -> Any:
    if name == "SendMessage":
        return _sent(code, text, number, whole=code)
    kind = {"Telemetry": "TelemetryCommand"}.get(name, f"{name}Response")
    return getattr(service, kind)(status=_status(code, text))


def _sent(code: int, text: str, number: int, *, whole: int) -> Any:
    entry = service.SendResultEntry(status=_status(code, text), message_id=f"m{number}", transaction_id=f"t{number}")
    return service.SendMessageResponse(status=_status(whole, text), entries=[entry])


def _status(code: int, text: str = "") -> Any:
    return definition.Status(code=code, message=text)


def _endpoints(port: int) -> Any:
    address = definition.Address(host=HOST, port=port)
    return definition.Endpoints(scheme=definition.AddressScheme.IPv4, addresses=[address])


class Wire:
    """Carries connections to a port. When it is cut, those there are go silent, as behind a machine without power."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._is_cut = [False]  # of the connections made since the last cut
        self._socket = socket.create_server((HOST, 0))
        self.port: int = self._socket.getsockname()[1]
        self._open: list[socket.socket] = [self._socket]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoints(self) -> str:
        return f"{HOST}:{self.port}"

    def lead_to(self, port: int) -> None:
        """Carry new connections elsewhere."""
        self._to = port

    def cut(self) -> None:
        self._is_cut[0] = True
        self._is_cut = [False]

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                far = socket.create_connection((HOST, self._to))
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=[source, sink, self._is_cut], daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_cut: list[bool]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not is_cut[0]:
                    sink.sendall(data)


TOPICS = [TopicSpec(str(kind), kind) for kind in TopicType]
