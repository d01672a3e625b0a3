"""The documents name only what exists."""

import re
from pathlib import Path

import pytest

from outbox.models import State

ROOT = Path(__file__).resolve().parents[1]
ALONE = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docker/README.md",
    "tests/README.md",
    "tests/fault-points.md",
)
PAGES = [ROOT / name for name in ALONE] + sorted((ROOT / "docs").rglob("*.md"))
# All but what is looked up in, and the pages of decisions, which have a form of their own.
READ_THROUGH = sorted(
    page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference" and not page.match("decisions/0*.md")
)
STATE_MACHINE = (ROOT / "docs/state-machine.md").read_text()


def links(page):
    return [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()) if "://" not in target]


class TestLinks:
    @pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
    def test_lead_somewhere(self, page):
        assert [target for target in links(page) if not (page.parent / target).exists()] == []

    def test_lead_to_every_decision(self):
        folder = ROOT / "docs/decisions"

        assert set(links(folder / "README.md")) == {page.name for page in folder.glob("0*.md")}


class TestADecision:
    @pytest.mark.parametrize("page", sorted((ROOT / "docs/decisions").glob("0*.md")), ids=lambda page: page.name)
    def test_has_its_status_and_its_date_which_the_index_has_too(self, page):
        [date] = re.findall(r"\n\nAccepted (\d{4}-\d\d-\d\d)\b.*\.\n\n", page.read_text())

        assert re.search(rf"\({page.name}\) \| {date} \|", (page.parent / "README.md").read_text())


class TestTheIndex:
    def test_leads_to_every_page(self):
        pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
        pages = {page for page in pages if not page.startswith("decisions/0")}

        assert set(links(ROOT / "docs/index.md")) - {"../README.md"} == pages - {"index.md"}


class TestAPage:
    @pytest.mark.parametrize("page", READ_THROUGH, ids=lambda page: str(page.relative_to(ROOT)))
    def test_opens_with_what_its_reader_can_do_after_it(self, page):
        _, _, text = page.read_text().partition("\n\n")

        assert text.startswith("After this page you ")


class TestTheStateMachine:
    def test_draws_every_state_and_no_other(self):
        drawing = STATE_MACHINE[STATE_MACHINE.index("```mermaid") : STATE_MACHINE.index("| from | to |")]

        assert set(re.findall(r"\b[A-Z]{4,}\b", drawing)) == {state.name for state in State}

    def test_names_files_that_exist(self):
        named = set(re.findall(r"`([a-z_/]+\.py)`", STATE_MACHINE))

        assert named
        assert [name for name in named if not (ROOT / "outbox" / name).exists()] == []


class TestTheArchitecture:
    DRAWING = (ROOT / "docs/explanation/architecture.md").read_text().partition("```mermaid")[2].partition("```")[0]

    def test_draws_each_package_and_no_other(self):
        packages = {path.parent.name for path in (ROOT / "outbox").glob("*/__init__.py")}

        assert set(re.findall(r"^ {8}(\w+)$", self.DRAWING, re.MULTILINE)) == packages

    @pytest.mark.parametrize(("upper", "lower"), re.findall(r"(\w+) --> (\w+)", DRAWING))
    def test_draws_an_arrow_where_a_package_imports_another(self, upper, lower):
        imports = re.compile(rf"^\s*(from outbox\.{lower}\b|from outbox import .*\b{lower}\b)", re.MULTILINE)

        assert any(imports.search(path.read_text()) for path in (ROOT / "outbox" / upper).rglob("*.py"))

    def test_names_files_that_exist(self):
        named = re.findall(r"`([a-z_/]+\.py)`", (ROOT / "docs/explanation/architecture.md").read_text())

        assert named
        assert [name for name in named if not (ROOT / "outbox" / name).exists()] == []
