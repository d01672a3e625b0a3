"""A class name means one thing in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

import outbox

ROOT = Path(outbox.__file__).parent

GIVEN = {"Meta", "Command", "Params"}  # names that Django and factory_boy look for


class TestClassNames:
    def test_are_of_one_class_each(self):
        found: dict[str, list[str]] = defaultdict(list)
        for path in ROOT.rglob("*.py"):
            if "migrations" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in GIVEN:
                    found[node.name].append(path.relative_to(ROOT).as_posix())

        assert found
        assert {name: files for name, files in found.items() if len(files) > 1} == {}
