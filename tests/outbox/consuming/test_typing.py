"""`@consumer` knows what its handler is called with: mypy on a user's module."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

HEAD = """
from collections.abc import Sequence

from outbox import Context, Message, RetryPolicy, consumer


class Placed(Message):
    order_id: int


class Shipped(Message):
    parcel: str


"""

RIGHT = {
    "of its type": """
@consumer(Placed, group="g", retry=RetryPolicy(limit=3), tags={"new"}, idempotency_key=lambda message: message.order_id)
def handle(message: Placed, context: Context) -> int:
    return message.order_id
""",
    "a coroutine function": """
@consumer(Placed, group="g")
async def handle(message: Placed, context: Context) -> None: ...
""",
    "of several types": """
@consumer(Placed, Shipped, group="g")
def handle(message: Placed | Shipped, context: Context) -> None: ...
""",
    "of any message": """
@consumer(Placed, group="g")
def handle(message: Message, context: object) -> None: ...
""",
    "of many at once": """
@consumer(Placed, group="g", batch_size=10)
def handle(messages: list[Placed], contexts: Sequence[Context]) -> None: ...
""",
    "a class": """
@consumer(Placed, group="g")
class Handler:
    def handle(self, message: Placed, context: Context) -> None: ...
""",
    "in two groups": """
@consumer(Placed, group="g")
@consumer(Placed, group="h")
def handle(message: Placed, context: Context) -> int:
    return 1


number: int = handle(Placed(order_id=1), NotImplemented)
""",
    "of a plain topic": """
@consumer(topic="orders", group="g")
def handle(message: dict[str, object], context: Context) -> None: ...
""",
    "without a context": """
@consumer(Placed, group="g")
def handle(message: Placed) -> None: ...
""",
}

WRONG = {
    "of another type": """
@consumer(Placed, group="g")
def handle(message: Shipped, context: Context) -> None: ...
""",
    "a coroutine function of another type": """
@consumer(Placed, group="g")
async def handle(message: Shipped, context: Context) -> None: ...
""",
    "of one of several types": """
@consumer(Placed, Shipped, group="g")
def handle(message: Placed, context: Context) -> None: ...
""",
    "of one where there are many": """
@consumer(Placed, group="g", batch_size=10)
def handle(message: Placed, context: Context) -> None: ...
""",
    "of many where there is one": """
@consumer(Placed, group="g")
def handle(messages: list[Placed], contexts: list[Context]) -> None: ...
""",
    "a class of another type": """
@consumer(Placed, group="g")
class Handler:
    def handle(self, message: Shipped, context: Context) -> None: ...
""",
    "with an option that is not there": """
@consumer(Placed, group="g", tagz={"new"})
def handle(message: Placed, context: Context) -> None: ...
""",
    "without a group": """
@consumer(Placed)
def handle(message: Placed, context: Context) -> None: ...
""",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What mypy says of each module, by its name; all of them in one run."""
    folder = tmp_path_factory.mktemp("typed")
    modules = {f"m{number}": text for number, text in enumerate([*RIGHT.values(), *WRONG.values()])}
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    (folder / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    cache = ROOT / ".mypy_cache/users"  # kept, since mypy reads Django's types for half a minute
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", cache, "--follow-imports", "silent"]
    ended = subprocess.run(
        [*command, *(f"{name}.py" for name in modules)], cwd=folder, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True
    )
    lines = ended.stdout.splitlines()
    assert lines[-1].endswith(f"(checked {len(modules)} source files)"), ended.stdout + ended.stderr
    said = {name: [line for line in lines if line.startswith(f"{name}.py:") and ": error: " in line] for name in modules}
    return dict(zip([*RIGHT, *WRONG], said.values(), strict=True))


@pytest.mark.slow
class TestAHandler:
    @pytest.mark.parametrize("name", RIGHT)
    def test_is_taken(self, found, name):
        assert found[name] == []

    @pytest.mark.parametrize("name", WRONG)
    def test_is_flagged(self, found, name):
        assert found[name]
