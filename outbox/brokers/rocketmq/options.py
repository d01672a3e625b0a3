"""OPTIONS of the RocketMQ broker."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec

from outbox.brokers.options import BrokerOptions, problems_with, read_address, read_options
from outbox.errors import ConfigurationError
from outbox.findings import Finding, wrong_option


class RocketMQOptions(BrokerOptions, frozen=True):
    """Addresses, credentials, and the server settings that the broker relies on."""

    endpoints: str  # host:port of the gRPC proxy; separate several with ";"
    # host:port of name servers, which know the addresses of the brokers' remoting ports. Half messages are committed and rolled
    # back there, because the answer of a proxy does not prove that a broker has stored this.
    name_servers: list[str] = []
    broker_addresses: dict[str, str] = {}  # broker name -> host:port; replaces what name servers report, or is used without them
    # Commit and roll back half messages through the proxy, if the brokers' remoting ports are unreachable. Messages can be lost;
    # docs/brokers/rocketmq.md says which.
    unconfirmed_ends: bool = False
    access_key: str = ""
    secret_key: str = ""
    namespace: str = ""
    tls: bool = False  # of connections to the proxy
    broker_tls: bool = False  # of connections to brokers and name servers
    tls_ca_file: str = ""  # PEM file of trusted certificate authorities; "": the defaults of gRPC and of Python's ssl
    # Compress longer bodies; RocketMQ's own clients use 4096. None: never, so that every consumer can read them.
    compress_above_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    request_timeout: timedelta = timedelta(seconds=3)
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64  # concurrent requests
    commit_window: timedelta = timedelta(seconds=2)  # for this time after a decision, its process may commit
    check_horizon: timedelta = timedelta(minutes=10)  # transactionTimeOut + transactionCheckMax x transactionCheckInterval


def problems(raw: Mapping[str, Any]) -> list[Finding]:
    """Return wrong names and types; if there are none, wrong values."""
    if findings := problems_with(RocketMQOptions, raw):
        return findings
    options = read_options(RocketMQOptions, raw)
    addresses = [("ENDPOINTS", endpoint) for endpoint in options.endpoints.split(";")]
    addresses += [("NAME_SERVERS", name_server) for name_server in options.name_servers]
    addresses += [("BROKER_ADDRESSES", broker_address) for broker_address in options.broker_addresses.values()]
    findings = [
        wrong_option(f'OPTIONS["{name}"] has {text!r}, which is not host:port.', 'Write it like "127.0.0.1:8081".')
        for name, text in addresses
        if (address := read_address(text)) is None or address[1] is None
    ]
    if bool(options.access_key) != bool(options.secret_key):
        findings.append(wrong_option("OPTIONS has only one of ACCESS_KEY and SECRET_KEY.", "Set both, or neither."))
    if options.tls_ca_file and not ((options.tls or options.broker_tls) and Path(options.tls_ca_file).is_file()):
        text = f'OPTIONS["TLS_CA_FILE"] is {options.tls_ca_file!r}: there is no such file, or TLS is off.'
        findings.append(wrong_option(text, "Set it to the path of a PEM file, and set TLS or BROKER_TLS to True."))
    return findings


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of "host:port". Raises ConfigurationError."""
    host, port = read_address(text) or ("", None)
    if port is None:
        raise ConfigurationError(f"{text!r} is not host:port.", hint="Correct it in OPTIONS, or at the server that reports it.")
    return host, port
