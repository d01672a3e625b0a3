"""Reads docker/compose.yaml as Docker Compose would: YAML with variables."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.check_back_secrets import SECRET

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"

# What docker/README.md has people put into docker/.env.
SECRETS = {
    "SECRET_KEY": "0123456789abcdef" * 4,
    "POSTGRES_PASSWORD": "0123456789abcdef",
    "RABBITMQ_PASSWORD": "fedcba9876543210",
    "CHECK_BACK_SECRET": SECRET,
}

VARIABLE = re.compile(r"\$\$|\$\{(?P<name>\w+)(?:(?P<sign>:[-?])(?P<rest>[^}]*))?\}")


class MissingVariable(Exception):
    """Raised when a variable is not set that must be."""


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Put variables into a text: ${NAME:-default}, ${NAME:?error}, and $$ for a dollar."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        found = variables.get(match["name"], "")
        if found or match["sign"] is None:
            return found
        if match["sign"] == ":?":
            raise MissingVariable(f"{match['name']} {match['rest']}")
        return match["rest"]

    return VARIABLE.sub(value, text)


def read(**variables: str) -> dict[str, Any]:
    """Read the file with variables; the secrets have values of their own."""
    return _fill(yaml.safe_load((DOCKER / "compose.yaml").read_text()), SECRETS | variables)


@cache
def services() -> dict[str, dict[str, Any]]:
    """Return the services by name."""
    return read()["services"]


def of_the_shop() -> dict[str, dict[str, Any]]:
    """Return those that run our image."""
    return {name: service for name, service in services().items() if service["image"] == "outbox-shop"}


def _fill(node: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _fill(value, variables) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill(value, variables) for value in node]
    return interpolate(node, variables) if isinstance(node, str) else node
