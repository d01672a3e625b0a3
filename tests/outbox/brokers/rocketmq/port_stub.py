"""A broker's own port that answers as it is told, and a name server in one, for what a real one cannot be made to do."""

import json
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import HEADER_BYTES, RemotingAnswer, Request, read_properties
from tests.outbox.brokers.rocketmq.port_log import Log, write_stored

HOST = "127.0.0.1"

# Settings of a broker with which nothing is wrong.
SETTINGS = {
    "brokerRole": "ASYNC_MASTER",
    "fileReservedTime": "72",
    "flushDiskType": "SYNC_FLUSH",
    "messageIndexEnable": "true",
    "messageIndexSafe": "true",
    "rejectTransactionMessage": "false",
    "transactionCheckInterval": "30000",
    "transactionCheckMax": "15",
    "transactionOpBatchInterval": "3600000",
    "transactionOpMsgMaxSize": "1",
    "transactionTimeOut": "6000",
    "transientStorePoolEnable": "false",
}

WELL = RemotingAnswer(0, "", {}, b"")


@dataclass
class Asked:
    """A request that came in, and where its answer goes."""

    request: Request
    number: int
    connection: socket.socket


Act = Callable[[Asked], None]


class PortStub:
    """
    One broker. All goes well with it until it is told otherwise; what it is told is of one kind of request, by its code.

    Args:
        name: its broker's name.
        certificate: speak TLS with it; its key is in key.pem beside it.
    """

    def __init__(self, name: str = "broker-a", certificate: Path | None = None) -> None:
        self.name = name
        self.log = Log()
        self.settings = dict(SETTINGS)
        self.groups: dict[str, dict[str, dict[str, Any]]] = {}  # topic -> groups that read it -> their settings
        self.entries: dict[str, str] = {}  # that it keeps as a name server
        self.requests: list[Request] = []
        self.brokers = [self]  # those that it names as a name server
        self.earliest_ms = 1  # since when it has everything
        self.clock_ahead = 0.0
        self.bytes_at_once = 1 << 20  # of an answer
        self.connected = 0
        self._certificate = certificate
        self._told: dict[int, tuple[Act, float]] = {}
        self._frozen: list[Asked] = []
        self._connections: list[socket.socket] = []
        self._port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def start(self) -> None:
        """Listen, at the port where it was before."""
        self._server = _Server((HOST, self._port), self)
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate, self._certificate.with_name("key.pem"))
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def stop(self) -> None:
        """Be away."""
        self._server.shutdown()
        self._server.server_close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def say(self, code: int, answer: int, text: str = "", *, does: bool = False, times: float = float("inf")) -> None:
        """Answer requests of a code with another code than 0, having done what they ask or not."""

        def act(asked: Asked) -> None:
            if does:
                self._do(asked.request)
            self._send(asked, RemotingAnswer(answer, text, {}, b""))

        self._told[code] = act, times

    def freeze(self, code: int, *, times: float = float("inf")) -> None:
        """Take requests and do nothing, until it is thawed."""
        self._told[code] = self._frozen.append, times

    def thaw(self) -> None:
        """Do and answer what was frozen, and freeze no more."""
        self._told.clear()
        for asked in self._frozen:
            self._do_and_answer(asked)
        self._frozen.clear()

    def close_at(self, code: int, *, does: bool, times: float = float("inf")) -> None:
        """Close the connection instead of an answer, having done what is asked or not."""

        def act(asked: Asked) -> None:
            if does:
                self._do(asked.request)
            asked.connection.shutdown(socket.SHUT_RDWR)

        self._told[code] = act, times

    def ask_all(self, number: int) -> None:
        """Send a request of the broker's own, which has a number of its own."""
        for connection in self._connections:
            connection.sendall(_frame({"code": 39, "flag": 0, "opaque": number}, b""))

    def recover(self) -> None:
        """Remove all faults."""
        self._told.clear()

    def asked(self, code: int) -> list[Request]:
        """Return the requests of a code."""
        return [request for request in list(self.requests) if request.code == code]

    def take(self, asked: Asked) -> None:
        """Deal with a request."""
        self.requests.append(asked.request)
        act, times = self._told.get(asked.request.code, (self._do_and_answer, 0))
        if times == 1:
            del self._told[asked.request.code]
        elif times:
            self._told[asked.request.code] = act, times - 1
        act(asked)

    def serve(self, connection: socket.socket) -> None:
        """Read requests until the other end closes."""
        self._connections.append(connection)
        self.connected += 1
        with suppress(OSError), connection.makefile("rb") as stream:
            while len(first := stream.read(HEADER_BYTES)) == HEADER_BYTES:
                size, head_size = struct.unpack(">ii", first)
                head = json.loads(stream.read(head_size))
                body = stream.read(size - 4 - head_size)
                self.take(Asked(Request(head["code"], head["extFields"], body), head["opaque"], connection))

    def _do_and_answer(self, asked: Asked) -> None:
        self._send(asked, self._do(asked.request))

    def _send(self, asked: Asked, answer: RemotingAnswer) -> None:
        head = {"code": answer.code, "flag": 1, "opaque": asked.number, "remark": answer.text, "extFields": answer.fields}
        data = _frame(head, answer.body)
        with suppress(OSError):  # who asked is gone
            for at in range(0, len(data), self.bytes_at_once):
                asked.connection.sendall(data[at : at + self.bytes_at_once])

    def _do(self, request: Request) -> RemotingAnswer:
        act = ACTS.get(request.code)
        return act(self, request.fields, request.body) if act else RemotingAnswer(3, "request type is not supported", {}, b"")

    def _name_brokers(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        brokers = [{"brokerName": one.name, "brokerAddrs": {"0": one.address}} for one in self.brokers]
        return RemotingAnswer(0, "", {}, json.dumps({"brokerDatas": brokers}).encode())

    def _put_entry(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        self.entries[fields["key"]] = fields["value"]
        return WELL

    def _get_entry(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        value = self.entries.get(fields["key"])
        return (
            RemotingAnswer(requests.NOTHING_FOUND, "", {}, b"") if value is None else RemotingAnswer(0, "", {"value": value}, b"")
        )

    def _store(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        stored = self.log.append(fields["b"], read_properties(fields["i"]), body, int(fields["f"]))
        return RemotingAnswer(0, "", {"msgId": stored.id, "queueOffset": str(stored.queue_offset)}, b"")

    def _end(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        place, offset, kind = (int(fields[name]) for name in ("commitLogOffset", "tranStateTableOffset", "commitOrRollback"))
        half = self.log.end(place, offset, kind)
        return WELL if half else RemotingAnswer(1, "Find prepared transaction message failed", {}, b"")

    def _query(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        found = self.log.find(fields["topic"], fields["key"])[: int(fields["maxNum"])]
        return RemotingAnswer(0 if found else requests.NOTHING_FOUND, "", {}, b"".join(map(write_stored, found)))

    def _view(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        found = self.log.messages.get(int(fields["offset"]))
        return (
            RemotingAnswer(0, "", {}, write_stored(found))
            if found
            else RemotingAnswer(1, "can not find message by the offset", {}, b"")
        )

    def _pull(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        at = int(fields["queueOffset"])
        found = self.log.of(fields["topic"], int(fields["queueId"]))[at:][: int(fields["maxMsgNums"])]
        behind = {"nextBeginOffset": str(at + len(found))}
        return RemotingAnswer(0 if found else requests.PULL_NOT_FOUND, "", behind, b"".join(map(write_stored, found)))

    def _offset_of(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        return RemotingAnswer(requests.NOTHING_FOUND, "no offset of the group", {}, b"")

    def _offset_at(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        queue = self.log.of(fields["topic"], int(fields["queueId"]))
        since = int(fields["timestamp"]) / 1000
        return RemotingAnswer(0, "", {"offset": str(sum(one.stored_at.timestamp() < since for one in queue))}, b"")

    def _end_of(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        return RemotingAnswer(0, "", {"offset": str(len(self.log.of(fields["topic"], int(fields["queueId"]))))}, b"")

    def _tell_settings(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        return RemotingAnswer(0, "", {}, "\n".join(f"{name}={value}" for name, value in self.settings.items()).encode())

    def _name_groups(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        return RemotingAnswer(0, "", {}, json.dumps({"groupList": list(self.groups.get(fields["topic"], ()))}).encode())

    def _tell_of_a_group(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        known = {name: one for groups in self.groups.values() for name, one in groups.items()}
        return RemotingAnswer(0, "", {}, json.dumps(known[fields["group"]]).encode())

    def _tell_times(self, fields: Mapping[str, Any], body: bytes) -> RemotingAnswer:
        started_at = time.time() + self.clock_ahead - (86400 + 2 * 3600 + 3 * 60 + 4)
        table = {
            "earliestMessageTimeStamp": str(self.earliest_ms),
            "bootTimestamp": f"{started_at * 1000:.0f}",
            "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]",
        }
        return RemotingAnswer(0, "", {}, json.dumps({"table": table}).encode())


ACTS: dict[int, Callable[[PortStub, Mapping[str, Any], bytes], RemotingAnswer]] = {
    requests.ROUTE_OF_TOPIC: PortStub._name_brokers,
    requests.PUT_KV_CONFIG: PortStub._put_entry,
    requests.GET_KV_CONFIG: PortStub._get_entry,
    requests.SEND_MESSAGE_V2: PortStub._store,
    requests.END_TRANSACTION: PortStub._end,
    requests.QUERY_MESSAGE: PortStub._query,
    requests.VIEW_MESSAGE: PortStub._view,
    requests.PULL_MESSAGE: PortStub._pull,
    requests.QUERY_CONSUMER_OFFSET: PortStub._offset_of,
    requests.SEARCH_OFFSET_BY_TIMESTAMP: PortStub._offset_at,
    requests.GET_MAX_OFFSET: PortStub._end_of,
    requests.GET_BROKER_CONFIG: PortStub._tell_settings,
    requests.GET_RUNTIME_INFO: PortStub._tell_times,
    requests.GROUPS_OF_TOPIC: PortStub._name_groups,
    requests.GET_GROUP_CONFIG: PortStub._tell_of_a_group,
}


def _frame(head: Mapping[str, Any], body: bytes) -> bytes:
    data = json.dumps({"language": "JAVA", "version": 477, "serializeTypeCurrentRPC": "JSON", **head}).encode()
    return struct.pack(">ii", 4 + len(data) + len(body), len(data)) + data + body


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each connection."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], stub: PortStub) -> None:
        super().__init__(address, socketserver.BaseRequestHandler)
        self._stub = stub

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):
            request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stub.serve(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that is closed is none."""
