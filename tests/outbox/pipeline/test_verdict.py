import pytest

from outbox.errors import ConfigurationError
from outbox.pipeline import verdict
from outbox.pipeline.errors import InvalidVerdict
from tests.outbox.pipeline.stand_in import CLEAN, REPORT

OTHER_KEY = "o" * 40
SIGNED = "mDw2gn666gIUMv8xuqDDyAX5TbLcxxD1j4048ezm16A"


def told(report=REPORT):
    return verdict.verdict_of(report, run=7, since=None, settle_seconds=300.0)


@pytest.fixture
def signed(key):
    text = verdict.serialize(told())
    return verdict.as_file(text, verdict.sign(text))


class TestAVerdict:
    def test_sums_the_report_up(self):
        summed = told()

        assert summed["found"] == {"lost at broker": 1}
        assert summed["is_clean"] is False
        assert (summed["run"], summed["data_digest"], summed["code_version"]) == (7, "sha256:abc", "1.0+abc")
        assert told(CLEAN)["is_clean"] is True

    def test_is_signed_alike_for_ever(self, monkeypatch):
        """Verdicts are kept for years, and verified by whatever release is there then."""
        monkeypatch.setenv("OUTBOX_AUDIT_KEY", OTHER_KEY)

        assert verdict.sign("a verdict") == SIGNED

    def test_is_not_signed_without_a_key(self, monkeypatch):
        monkeypatch.delenv("OUTBOX_AUDIT_KEY", raising=False)

        assert verdict.sign("anything") == ""


class TestVerify:
    def test_gives_what_was_signed(self, signed):
        assert verdict.verify(signed)["run"] == 7

    def test_refuses_each_changed_byte(self, signed):
        for place in range(len(signed)):
            for other in ("0", " ", "\r\n"):
                changed = signed[:place] + other + signed[place + 1 :]
                if changed != signed:
                    with pytest.raises(InvalidVerdict):
                        verdict.verify(changed)

    @pytest.mark.parametrize("more", ["\n", " ", "{}", "\0"])
    def test_refuses_what_is_longer(self, signed, more):
        with pytest.raises(InvalidVerdict):
            verdict.verify(signed + more)

    def test_refuses_a_name_that_is_there_twice(self, signed):
        with pytest.raises(InvalidVerdict, match="file was edited"):
            verdict.verify(signed.replace('"verdict": {', '"verdict": {\n    "is_clean": true,', 1))

    def test_takes_a_key_that_signed_once(self, signed, key, monkeypatch):
        monkeypatch.setenv("OUTBOX_AUDIT_KEY", f"{OTHER_KEY} {key}")

        assert verdict.verify(signed)["run"] == 7

    def test_refuses_another_key(self, signed, monkeypatch):
        monkeypatch.setenv("OUTBOX_AUDIT_KEY", OTHER_KEY)

        with pytest.raises(InvalidVerdict, match="signed with another key"):
            verdict.verify(signed)

    def test_refuses_what_was_never_signed(self, key):
        with pytest.raises(InvalidVerdict, match="is not signed"):
            verdict.verify(verdict.as_file(verdict.serialize(told()), ""))

    @pytest.mark.parametrize(
        "content",
        ["", "[]", "null", '"', '{"verdict": {}}', "[" * 100_000, '{"verdict": "\\ud800", "signature": "x"}'],
        ids=["nothing", "a list", "null", "half a text", "no signature", "too deep", "half a character"],
    )
    def test_refuses_what_is_none(self, key, content):
        with pytest.raises(InvalidVerdict):
            verdict.verify(content)

    def test_needs_a_key(self, signed, monkeypatch):
        monkeypatch.delenv("OUTBOX_AUDIT_KEY")

        with pytest.raises(ConfigurationError, match="no key to verify with"):
            verdict.verify(signed)

    def test_refuses_a_key_that_can_be_guessed(self, monkeypatch):
        monkeypatch.setenv("OUTBOX_AUDIT_KEY", "secret")

        with pytest.raises(ConfigurationError, match="fewer than 32 characters"):
            verdict.keys()
