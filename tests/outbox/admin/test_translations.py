"""Texts of the admin in another language: each is in the German catalogue, and the pages show it."""

import ast
import re
from gettext import GNUTranslations
from pathlib import Path

import django
import pytest
from django.template.loader import get_template
from django.templatetags.i18n import BlockTranslateNode, TranslateNode
from django.urls import reverse

import outbox
from outbox.models import Topic
from outbox.pipeline import runs
from tests.outbox.pipeline.stand_in import REPORT

CODE = Path(outbox.__file__).parent
CATALOGUE = CODE / "locale/de/LC_MESSAGES/django"
MARKS = {"_": 0, "gettext_noop": 0, "ngettext": 0, "pgettext_lazy": 1}  # function -> place of the text in its arguments
ENTRY = re.compile(r'^(?:msgctxt (".*")\n)?msgid (".+")\n(?:msgid_plural ".*"\n)?((?:msgstr.*\n)+)', re.M)


def marked_in_code() -> set[str]:
    """Return the texts that Python's code marks."""
    texts = [
        node.args[MARKS[node.func.id]]
        for path in CODE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MARKS
    ]
    return {text.value for text in texts if isinstance(text, ast.Constant)}


def marked_in_templates() -> set[str]:
    texts = set()
    for path in CODE.rglob("*.html"):
        nodes = get_template(str(path).rpartition("/templates/")[2]).template.nodelist
        texts |= {node.filter_expression.var.literal for node in nodes.get_nodes_by_type(TranslateNode)}
        texts |= {node.render_token_list(node.singular)[0] for node in nodes.get_nodes_by_type(BlockTranslateNode)}
    return texts


def written() -> dict[str, list[str]]:
    """Return what the .po file has: text -> its translations, of its plural and of all its contexts."""
    texts: dict[str, list[str]] = {}
    for _, text, lines in ENTRY.findall(CATALOGUE.with_suffix(".po").read_text() + "\n"):
        translations = texts.setdefault(ast.literal_eval(text), [])
        translations += [ast.literal_eval(line.partition(" ")[2]) for line in lines.splitlines()]
    return texts


def compiled(path: Path) -> dict[object, str]:
    with path.open("rb") as file:
        return GNUTranslations(file)._catalog


class TestCatalogue:
    def test_has_each_text_that_is_marked_and_no_other(self):
        assert set(written()) == marked_in_code() | marked_in_templates()

    def test_translates_each_text(self):
        assert [text for text, translations in written().items() if not all(translations)] == []

    def test_keeps_the_values_of_each_text(self):
        values = re.compile(r"%\(\w+\)s|\{[^}]*\}")
        for text, translations in written().items():
            wanted = [value.strip("{}0123456789") for value in values.findall(text)]
            for translation in translations:
                assert sorted(value.strip("{}0123456789") for value in values.findall(translation)) == sorted(wanted), text

    def test_is_what_was_compiled(self):
        values = compiled(CATALOGUE.with_suffix(".mo")).values()

        assert {text for text in values if "Project-Id-Version" not in text} == {
            translation for translations in written().values() for translation in translations
        }

    def test_changes_no_text_of_the_admin_of_django(self):
        own = compiled(Path(django.__file__).parent / "contrib/admin/locale/de/LC_MESSAGES/django.mo")

        assert {text: own[text] for text in written() if text in own} == {
            text: translations[0] for text, translations in written().items() if text in own
        }


@pytest.mark.django_db
class TestPages:
    @pytest.fixture(autouse=True)
    def german(self, settings):
        settings.LANGUAGE_CODE = "de"

    @pytest.fixture
    def finding(self):
        run = runs.begin("default", asked_by="command", since=None, settle_seconds=300)
        runs.finish(run, REPORT, exit_code=0)
        return run.findings.get()

    def test_of_the_overview_are_german(self, admin_client):
        page = admin_client.get(reverse("admin:outbox_overview_changelist")).text

        for text in ("Übersicht", "Zurückgestellte Nachrichten", "Rückstand", "Verarbeitet pro Minute", "Die letzte Stunde"):
            assert text in page

    def test_of_a_list_are_german(self, admin_client):
        page = admin_client.get(reverse("admin:outbox_deferred_changelist")).text

        for text in ("Jetzt verarbeiten", "Gruppe", "Nur genaue Treffer.", "0 zurückgestellte Nachrichten", "Die letzte Woche"):
            assert text in page

    def test_tell_of_a_pause_in_german(self, admin_client):
        topic = Topic.objects.first()

        page = admin_client.post(reverse("admin:outbox_topic_pause", args=[topic.pk]), {"reason": "Umzug"}, follow=True).text

        assert f"Das Topic {topic.name} ist angehalten." in page
        assert "Veröffentlicht wird weiterhin" in page

    def test_of_an_audit_and_its_report_are_german(self, admin_client, finding):
        page = admin_client.get(reverse("admin:outbox_pipeline_auditrun_change", args=[finding.run_id])).text
        report = admin_client.get(reverse("admin:outbox_pipeline_auditrun_report", args=[finding.run_id])).text

        assert '<html lang="de">' in report
        for text in ("1 Befund", "fertig", "nicht signiert", "Fachdaten", "Rückstand von points, orders", "Latenz", "Stationen"):
            assert text in page
            assert text in report

    def test_of_findings_are_german(self, admin_client, finding):
        listed = admin_client.get(reverse("admin:outbox_pipeline_auditfinding_changelist")).text
        page = admin_client.get(reverse("admin:outbox_pipeline_auditfinding_change", args=[finding.pk])).text

        for text in ("Audit-Befunde", "Mit Notiz quittieren", "offen", "Nach Station", f"Audit {finding.run_id}"):
            assert text in listed
        for text in (f"Befund {finding.pk} von Audit {finding.run_id}", "Nicht erneut sendbar", "Stand 2026-11-20"):
            assert text in page
