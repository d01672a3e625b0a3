"""Translates librdkafka's settings to those of Kafka's clients in Java, which Spark has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outbox.errors import ConfigurationError

LOGIN = 'org.apache.kafka.common.security.{module} required username="{username}" password="{password}";'
LOGIN_MODULES = {
    "PLAIN": "plain.PlainLoginModule",
    "SCRAM-SHA-256": "scram.ScramLoginModule",
    "SCRAM-SHA-512": "scram.ScramLoginModule",
}
# librdkafka's names -> Java's. The first is the path of a PEM file, the second has what such a file contains.
PEM = {
    "ssl.truststore.certificates": ("ssl.ca.location", "ssl.ca.pem"),
    "ssl.keystore.certificate.chain": ("ssl.certificate.location", "ssl.certificate.pem"),
    "ssl.keystore.key": ("ssl.key.location", "ssl.key.pem"),
}
SAME = ("client.dns.lookup", "ssl.key.password", "ssl.cipher.suites")
VERIFY_HOST = "ssl.endpoint.identification.algorithm"
TRANSLATED = {
    "security.protocol",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    VERIFY_HOST,
    *SAME,
    *(name for names in PEM.values() for name in names),
}
OF_SECURITY = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.")


def java_settings(client: Mapping[str, Any]) -> dict[str, str]:
    """
    Return the settings by which a client in Java connects as ours do; without those that only tune a client.

    Certificates and keys are in the settings themselves, so they need no file where the client runs.

    Raises:
        ConfigurationError: a setting of CLIENT that a connection may depend on has no counterpart, or a file cannot be read.
    """
    for name in client:
        if name.startswith(OF_SECURITY) and name not in TRANSLATED:
            raise ConfigurationError(f'OPTIONS["CLIENT"] sets {name!r}, which is not translated for clients in Java.')
    found = {"bootstrap.servers": str(client["bootstrap.servers"])}
    if "security.protocol" in client:
        found["security.protocol"] = str(client["security.protocol"]).upper()
    if VERIFY_HOST in client:
        found[VERIFY_HOST] = str(client[VERIFY_HOST]).replace("none", "")
    found |= {name: str(client[name]) for name in SAME if name in client}
    return found | _login(client) | _certificates(client)


def _login(client: Mapping[str, Any]) -> dict[str, str]:
    mechanism = str(client.get("sasl.mechanism", client.get("sasl.mechanisms", ""))).upper()
    if "sasl.username" not in client and not mechanism:
        return {}
    if mechanism not in LOGIN_MODULES:
        raise ConfigurationError(
            f'OPTIONS["CLIENT"] has the SASL mechanism {mechanism or "GSSAPI"}; only {", ".join(LOGIN_MODULES)} are translated '
            "for clients in Java."
        )
    names = {name: _quoted(str(client.get(f"sasl.{name}", ""))) for name in ("username", "password")}
    return {"sasl.mechanism": mechanism, "sasl.jaas.config": LOGIN.format(module=LOGIN_MODULES[mechanism], **names)}


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _certificates(client: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, (location, pem) in PEM.items():
        if pem in client:
            found[name] = str(client[pem])
        elif location in client:
            try:
                found[name] = Path(str(client[location])).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f'OPTIONS["CLIENT"]["{location}"] cannot be read as a PEM file: {error}') from error
    if "ssl.truststore.certificates" in found:
        found["ssl.truststore.type"] = "PEM"
    if "ssl.keystore.key" in found:
        found["ssl.keystore.type"] = "PEM"
    return found
