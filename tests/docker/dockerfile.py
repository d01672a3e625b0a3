"""Reads docker/Dockerfile: its stages, each a list of instructions."""

import json
import re
import shlex

from tests.docker.compose import DOCKER


def stages() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage: (name, argument)."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    found: list[list[tuple[str, str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, argument = line.split(None, 1)
            if name == "FROM":
                found.append([])
            found[-1].append((name, " ".join(argument.split())))
    return found


def arguments(name: str, stage: int = -1) -> list[str]:
    """Return the arguments of an instruction in a stage, the last by default."""
    return [argument for found, argument in stages()[stage] if found == name]


def environment() -> dict[str, str]:
    """Return the variables that the image sets."""
    return dict(pair.split("=", 1) for argument in arguments("ENV") for pair in shlex.split(argument))


def command() -> list[str]:
    """Return what the image runs by itself."""
    return json.loads(arguments("CMD")[-1])  # type: ignore[no-any-return]


def healthcheck() -> list[str]:
    """Return how the image asks itself."""
    return json.loads(arguments("HEALTHCHECK")[-1].partition("CMD ")[2])  # type: ignore[no-any-return]
