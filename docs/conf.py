"""The site of the documentation, which `make site` builds. Source: https://www.sphinx-doc.org."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import django
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
django.setup()

_pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())

project = _pyproject["project"]["name"]
version = release = _pyproject["project"]["version"]
REPOSITORY = _pyproject["project"]["urls"]["Repository"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
myst_enable_extensions = ["deflist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
nitpicky = True
smartquotes = False  # texts have "" for an empty one
nitpick_ignore_regex = [("py:.*", ".*")]  # names of types in signatures lead to those that have an entry

default_role = "code"  # of docstrings
autodoc_default_options = {"members": True, "no-value": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_param = False
python_maximum_signature_line_length = 80

for module in ("outbox.consuming.register", "outbox.publishing.decorator"):
    ModuleAnalyzer.for_module(module).analyze()
    ModuleAnalyzer.for_module(module).overloads.clear()  # type checkers read these; the function itself has all parameters

html_theme = "furo"
html_title = f"{project} {release}"
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}


TREE = """
```{{toctree}}
:hidden:
:glob:
:caption: {caption}

{pages}
```
"""


def setup(app: Sphinx) -> None:
    """Change signatures, and pages, which are also read in the repository, for the site."""
    app.connect("autodoc-process-signature", _shorten)
    app.connect("source-read", _adapt)


def _shorten(app: Sphinx, what: str, name: str, kind: Any, options: object, signature: str | None, returns: str) -> Any:
    """Leave out the signature that all errors have, and write the defaults of `RetryPolicy` as its source does."""
    if not signature:
        return None
    if what == "exception" and "__init__" not in vars(kind):
        return "", ""
    signature = re.sub(r"\(datetime\.timedelta\(.*?\)\)", "RETRY_DELAYS", signature)
    return re.sub(r"<class '(\w+)'>", r"\1", signature), returns


def _adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """
    Point links to files that are no pages at the repository, and add the navigation.

    A block `{outbox} settings` becomes the Markdown that `docs/blocks/settings.py` makes of the code.
    """
    folder = (ROOT / "docs" / page).parent

    def absolute(link: re.Match[str]) -> str:
        path = (folder / link[2]).resolve()
        is_outside = not path.is_relative_to(ROOT / "docs") and path.exists()
        return f"]({REPOSITORY}/blob/main/{path.relative_to(ROOT)}{link[3] or ''})" if is_outside else link[0]

    def made_of_code(block: re.Match[str]) -> str:
        app.env.note_reread()
        markdown: str = import_module(f"docs.blocks.{block[1]}").page()
        return markdown

    source[0] = re.sub(r"```\{outbox\} (\w+)\n```", made_of_code, source[0])
    source[0] = re.sub(r"(\]\()(\.\./[^)#]*)(#[^)]*)?\)", absolute, source[0])
    if page == "decisions/README":
        source[0] += TREE.format(caption="Decisions", pages="0*")
    if page == "index":
        _, *sections = re.split(r"^## (.+)\n", source[0], flags=re.MULTILINE)
        for caption, table in zip(sections[::2], sections[1::2], strict=True):
            rows = re.findall(r"^\| \[(.+)\]\((.+)\.md\)", table, flags=re.MULTILINE)
            source[0] += TREE.format(caption=caption, pages="\n".join(f"{name} <{path}>" for name, path in rows))
