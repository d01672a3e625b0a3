"""The parser for bodies of signed requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser


class QuestionParser(BaseParser):
    """
    Parses JSON that is unambiguous.

    It is decoded as UTF-8, whatever the content type says, which is not signed. Duplicate names and the constants NaN and
    Infinity are rejected. Everything that cannot be parsed is a ParseError.
    """

    media_type = "application/json"

    def parse(self, stream: IO[bytes], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        try:
            return json.loads(stream.read().decode(), object_pairs_hook=_names_once, parse_constant=_refuse_constant)
        except RecursionError:
            raise ParseError("The JSON is nested too deeply.") from None
        except ValueError as error:
            raise ParseError(f"This is not valid JSON: {error}") from None


def _names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name comes twice")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")
