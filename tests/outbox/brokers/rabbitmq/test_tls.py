"""TLS: the certificate is checked."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox.brokers.base import Outgoing, SendStatus
from project.servers.program import HOST, free_port
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.conftest import Open
from tests.outbox.brokers.rocketmq.certificates import make_certificate

pytestmark = pytest.mark.rabbitmq

CONFIG = """
listeners.ssl.1 = {host}:{port}
ssl_options.certfile = {folder}/cert.pem
ssl_options.keyfile = {folder}/key.pem
ssl_options.verify = verify_none
"""


@pytest.fixture
def secured(tmp_path: Path):
    """Yield the address of a node that speaks TLS, and its certificate."""
    certificate, port = make_certificate(tmp_path), free_port()
    with RabbitMQ(tmp_path / "home", settings=CONFIG.format(host=HOST, port=port, folder=tmp_path)):
        yield f"{HOST}:{port}", certificate


class TestTls:
    def test_carries_messages_where_the_authority_is_known_and_nothing_otherwise(
        self, secured, open_broker: Open, message: Callable[..., Outgoing], tmp_path
    ):
        address, certificate = secured
        other = tmp_path / "other"
        other.mkdir()
        broker = open_broker(NODES=[address], TLS=True, TLS_CA_FILE=str(certificate))
        stranger = open_broker(NODES=[address], TLS=True, TLS_CA_FILE=str(make_certificate(other)))

        [taken], [refused] = broker.send([message()]), stranger.send([message()])

        assert taken.status is SendStatus.ACCEPTED
        assert refused.status is SendStatus.UNAVAILABLE
        assert "CERTIFICATE_VERIFY_FAILED" in refused.reason
        broker.close()
        stranger.close()
        shutil.rmtree(other)
