"""Where RocketMQ nodes listen that are started side by side."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from project.servers.program import HOST
from project.servers.rocketmq_ports import Ports, serves_http2


class TestFree:
    def test_finds_no_ports_twice_while_nobody_listens_yet(self, monkeypatch: pytest.MonkeyPatch):
        first = Ports.free()
        chosen = iter([first.namesrv, *range(20_000, 32_000, 10)])
        monkeypatch.setattr(random, "randrange", lambda *_: next(chosen))

        assert Ports.free() != first


class TestServesHttp2:
    def test_takes_a_port_where_nothing_is_said_for_one_that_is_not_ready(self):
        with socket.create_server((HOST, 0)) as silent, pytest.raises(TimeoutError):
            serves_http2(silent.getsockname()[1])

    def test_knows_another_server_from_one(self):
        with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor() as pool:
            answer = pool.submit(serves_http2, server.getsockname()[1])
            client, _ = server.accept()
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n")

            assert answer.result() is False
