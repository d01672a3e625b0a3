"""Metadata of the package that depend on the account of its repository, which pyproject.toml names once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/{account}/{name}"
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)")


class Metadata(MetadataHookInterface):
    """Adds the URLs, and the README with absolute links: package indexes have no other files to link to."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata of `[project]`."""
        repository = REPOSITORY.format(account=self.config["account"], name=metadata["name"])
        pages = f"{repository}/blob/main"
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = RELATIVE_LINK.sub(f"]({pages}/", readme).replace(".png)", ".png?raw=true)")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Documentation": f"{pages}/docs/index.md",
            "Changelog": f"{pages}/CHANGELOG.md",
            "Repository": repository,
            "Issues": f"{repository}/issues",
        }
