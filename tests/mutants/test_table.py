from pathlib import Path

import pytest

from tests.mutants.__main__ import choose
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
class TestAMutant:
    def test_is_a_text_that_its_file_has_once(self, mutant):
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1

    def test_is_python(self, mutant):
        compile((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new), mutant.file, "exec")

    def test_has_tests_that_are_there(self, mutant):
        assert [path for path in mutant.tests if path.startswith("tests/") and not (ROOT / path).exists()] == []


class TestSome:
    def test_are_others_each_turn_until_all_had_theirs(self):
        names = list("abcdefgh")

        assert choose(names, 3, turn=0) == ["a", "c", "e"]
        assert {name for turn in range(len(names)) for name in choose(names, 3, turn)} == set(names)

    def test_are_no_more_than_there_are(self):
        assert sorted(choose(["a", "b"], 5, turn=7)) == ["a", "b"]
