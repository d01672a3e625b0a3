"""The site of the documentation, which `make site` builds. Source: https://www.sphinx-doc.org."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
_pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())

project = _pyproject["project"]["name"]
version = release = _pyproject["project"]["version"]
REPOSITORY = f"https://github.com/{_pyproject['tool']['hatch']['metadata']['hooks']['custom']['account']}/{project}"

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
exclude_patterns = ["README.md", "generate"]  # index.md has the first
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = f"{project} {release}"
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}


DECISIONS = """
```{toctree}
:hidden:
:glob:

0*
```
"""


def setup(app: Sphinx) -> None:
    """Change pages, which are also read in the repository, for the site."""
    app.connect("source-read", _adapt)


def _adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Have links to files that are no pages lead to the repository, and list the decisions below their own page."""
    folder = (ROOT / "docs" / page).parent

    def absolute(link: re.Match[str]) -> str:
        path = (folder / link[2]).resolve()
        is_outside = not path.is_relative_to(ROOT / "docs") and path.exists()
        return f"]({REPOSITORY}/blob/main/{path.relative_to(ROOT)}{link[3] or ''})" if is_outside else link[0]

    source[0] = re.sub(r"(\]\()(\.\./[^)#]*)(#[^)]*)?\)", absolute, source[0])
    if page == "decisions/README":
        source[0] += DECISIONS
