"""Where RocketMQ nodes listen that are started side by side."""

import random

import pytest

from project.servers.rocketmq_ports import Ports


class TestFree:
    def test_finds_no_ports_twice_while_nobody_listens_yet(self, monkeypatch: pytest.MonkeyPatch):
        first = Ports.free()
        chosen = iter([first.namesrv, *range(20_000, 32_000, 10)])
        monkeypatch.setattr(random, "randrange", lambda *_: next(chosen))

        assert Ports.free() != first
