"""OPTIONS of the Kafka broker, which need no server."""

import pytest

from outbox.brokers.kafka import KafkaBroker

SERVERS = {"SERVERS": ["kafka-1:9092"]}


def texts(**options) -> list[str]:
    return [problem.text for problem in KafkaBroker.check_settings({**SERVERS, **options})]


class TestServers:
    def test_that_are_not_addresses_are_named(self):
        assert texts(SERVERS=["kafka-1"]) == ["OPTIONS[\"SERVERS\"] has 'kafka-1', which is not host:port."]
        assert texts(SERVERS=[]) == ['OPTIONS["SERVERS"] is empty.']


class TestClient:
    def test_may_set_what_the_client_takes(self):
        client = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "shop", "sasl.password": "p"}

        assert texts(CLIENT={**client, "compression.type": "zstd", "socket.keepalive.enable": True}) == []

    @pytest.mark.parametrize("name", ["acks", "transactional.id", "retry.backoff.ms"])
    def test_may_not_set_what_the_outbox_sets(self, name):
        assert texts(CLIENT={name: "1"}) == [f'OPTIONS["CLIENT"] sets {name!r}, which the outbox sets itself.']

    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("linger", 5, 'No such configuration property: "linger"'),
            ("linger.ms", "soon", "Invalid value for configuration property"),
            ("compression.type", "zippy", 'Invalid value "zippy"'),
            ("message.max.bytes", 5, "outside allowed range"),
            ("max.in.flight", 10, "must be set <= 5"),
            ("stats_cb", "log", "callable"),
        ],
    )
    def test_that_the_client_does_not_take_is_named(self, name, value, why):
        [text] = texts(CLIENT={"client.rack": "a", name: value})

        assert text.startswith(f'Kafka\'s client does not take OPTIONS["CLIENT"]["{name}"]: ')
        assert why in text

    def test_that_lacks_a_setting_says_which(self):
        [text] = texts(CLIENT={"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"})

        assert "sasl.username and sasl.password must be set" in text

    def test_without_its_certificates_is_no_error_since_they_may_be_elsewhere(self):
        [problem] = KafkaBroker.check_settings({**SERVERS, "CLIENT": {"security.protocol": "SSL", "ssl.ca.location": "/missing"}})

        assert "ssl.ca.location failed" in problem.text
        assert not problem.is_serious()
