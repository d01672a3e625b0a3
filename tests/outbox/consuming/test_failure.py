import json

import pytest

from outbox.consuming import failures
from outbox.consuming.failures import causes, fingerprint


def error_of(call, *arguments) -> Exception:
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def refuse(what):
    raise ValueError(what)


def read(text):
    json.loads(text)


@pytest.fixture(autouse=True)
def _met_none(monkeypatch):
    monkeypatch.setattr(failures, "_seen_errors", {})


class TestIsNew:
    def test_is_true_once_for_errors_that_look_alike(self):
        answers = [failures.is_new_error(error_of(refuse, f"order {number}")) for number in range(3)]

        assert answers == [True, False, False]

    def test_forgets_what_was_not_met_for_long(self, monkeypatch):
        monkeypatch.setattr(failures, "MAX_REMEMBERED", 2)
        for what in ("a", "b", "a", "c"):
            failures.is_new_error(error_of(refuse, what))

        assert failures.is_new_error(error_of(refuse, "b"))
        assert not failures.is_new_error(error_of(refuse, "c"))


class TestCauses:
    def test_are_the_members_of_a_group(self):
        members = [ValueError("a"), ExceptionGroup("inner", [KeyError("b")])]

        assert {str(cause) for cause in causes(ExceptionGroup("outer", members))} >= {"a", "'b'"}

    @pytest.mark.parametrize("value", [("refused", "timed out"), 2, None])
    def test_are_no_attribute_of_another_error_that_has_the_name(self, value):
        error = ValueError("no")
        error.exceptions = value

        assert list(causes(error)) == [error]


class TestFingerprint:
    def test_is_equal_for_other_numbers_and_ids(self):
        first = error_of(refuse, "order 17 of 3f2504e0-4f89-11d3-9a0c-0305e82c3301 at 0x7f3a")
        second = error_of(refuse, "order 4711 of 9b2504e0-4f89-11d3-9a0c-0305e82c3309 at 0x1")

        assert fingerprint(first) == fingerprint(second) == f"ValueError in {__name__}.refuse: order # of # at #"

    def test_differs_for_another_type_or_place_or_word(self):
        texts = {
            fingerprint(error_of(refuse, "a")),
            fingerprint(error_of(refuse, "b")),
            fingerprint(error_of(lambda: refuse("a"))),
            fingerprint(error_of(read, "")),
        }

        assert len(texts) == 3

    def test_names_the_users_own_code_not_the_librarys(self):
        assert f"in {__name__}.read:" in fingerprint(error_of(read, "{"))

    def test_of_a_long_error_shows_that_it_is_cut(self):
        assert fingerprint(ValueError("word " * 1000)).endswith("…")

    def test_takes_an_error_that_was_never_raised(self):
        assert fingerprint(ValueError("a")) == "ValueError in no frame: a"
