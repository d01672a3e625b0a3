import pytest

from outbox.errors import ConfigurationError
from outbox.pipeline.job_config import java_settings


def translated(**client: str) -> dict[str, str]:
    named = {name.replace("_", "."): value for name, value in client.items()}
    found = java_settings({"bootstrap.servers": "kafka-1:9092,kafka-2:9092", **named})
    assert found.pop("bootstrap.servers") == "kafka-1:9092,kafka-2:9092"
    return found


class TestJavaSettings:
    def test_leave_out_what_only_tunes_a_client(self):
        assert translated(compression_type="zstd", socket_keepalive_enable="true") == {}

    @pytest.mark.parametrize(
        ("mechanism", "module"), [("PLAIN", "plain.PlainLoginModule"), ("SCRAM-SHA-512", "scram.ScramLoginModule")]
    )
    def test_have_user_and_password_in_a_login_module(self, mechanism, module):
        found = translated(security_protocol="sasl_ssl", sasl_mechanism=mechanism, sasl_username="shop", sasl_password='a"b\\c')

        assert found == {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "sasl.jaas.config": f'org.apache.kafka.common.security.{module} required username="shop" password="a\\"b\\\\c";',
        }

    def test_have_the_certificates_themselves(self, tmp_path):
        for name in ("ca", "certificate", "key"):
            (tmp_path / name).write_text(f"the {name}")

        found = translated(
            security_protocol="ssl",
            ssl_ca_location=str(tmp_path / "ca"),
            ssl_certificate_location=str(tmp_path / "certificate"),
            ssl_key_location=str(tmp_path / "key"),
            ssl_key_password="p",
            ssl_endpoint_identification_algorithm="none",
        )

        assert found == {
            "security.protocol": "SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": "the ca",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": "the certificate",
            "ssl.keystore.key": "the key",
            "ssl.key.password": "p",
            "ssl.endpoint.identification.algorithm": "",
        }

    @pytest.mark.parametrize(
        ("client", "text"),
        [
            ({"enable_ssl_certificate_verification": "false"}, "'enable.ssl.certificate.verification', which is not translated"),
            ({"sasl_oauthbearer_method": "oidc"}, "'sasl.oauthbearer.method', which is not translated"),
            ({"sasl_mechanism": "OAUTHBEARER"}, "mechanism OAUTHBEARER; only PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
            ({"ssl_ca_location": "/nowhere/ca.pem"}, "cannot be read as a PEM file"),
        ],
    )
    def test_refuse_what_a_connection_may_depend_on_and_java_has_not(self, client, text):
        with pytest.raises(ConfigurationError, match=text):
            translated(**client)
