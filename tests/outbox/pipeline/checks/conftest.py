"""The pipeline's checks, on settings and types that a test gives them."""

import pytest


@pytest.fixture(autouse=True)
def _own_definitions(own_definitions: None) -> None:
    """Every test here has definitions of its own."""
