"""The pipeline's checks, on settings and types that a test gives them."""

import re
from datetime import timedelta

import pytest
from django.apps import apps
from django.apps.registry import Apps
from django.core.checks import Error, Tags, run_checks
from django.db import connection, models
from django.test import override_settings
from django.utils import timezone

from outbox import Message
from outbox.pipeline import job_config
from outbox.pipeline.checks import check_archive, pipeline_settings
from outbox.pipeline.conf import AuditSettings, PipelineSettings
from outbox.pipeline.job_config import business_of
from outbox.pipeline.spark.statements import of_business


@pytest.fixture(autouse=True)
def _own_definitions(own_definitions):
    pass


class TestE001:
    @pytest.mark.parametrize(
        ("pipeline", "text"),
        [
            ({"AUDITS": {}}, r"OUTBOX\[\"PIPELINE\"\] has an unknown setting 'AUDITS'.*Did you mean AUDIT\?"),
            (
                {"AUDIT": {"orders": {"MODEL": "shop.Order"}}},
                r'^OUTBOX\["PIPELINE"\]\["AUDIT"\]\["orders"\] has no EXPECTS, which is required\. ',
            ),
            ({"AUDIT_RETENTION": "soon"}, r"has a wrong value: Invalid ISO8601 duration.*Write timedelta"),
            ({"AUDIT_RETENTION": "PT0S"}, r'\["PIPELINE"\]\["AUDIT_RETENTION"\] is 0:00:00; it must be greater than zero'),
        ],
        ids=["an unknown name", "a name left out", "no duration", "a duration of zero"],
    )
    def test_says_what_is_wrong_with_the_settings(self, settings, found, pipeline, text):
        settings.OUTBOX = {"PIPELINE": pipeline}

        (problem,) = found()

        assert (problem.id, type(problem)) == ("outbox.E001", Error)
        assert re.search(text, f"{problem.msg} {problem.hint}")
        assert "outbox/pipeline/conf.py" in problem.hint

    def test_leaves_what_is_no_dict_to_the_outbox(self, settings, found):
        settings.OUTBOX = {"PIPELINE": ["audit"]}

        assert [problem.id for problem in found()] == ["outbox.E001"]

    def test_is_quiet_otherwise(self, settings, found):
        settings.OUTBOX = {"PIPELINE": {"AUDIT_RETENTION": "P30D", "ARCHIVE": {"PATH": "/srv/lake"}}}

        assert found() == []


class TestPipelineSettings:
    def test_are_the_default_ones_where_the_check_has_reported_wrong_ones(self, settings):
        settings.OUTBOX = {"PIPELINE": {"AUDITS": {}}}

        assert pipeline_settings() == PipelineSettings()


def problems(archive, **more):
    with override_settings(OUTBOX={"PIPELINE": {"ARCHIVE": archive}, **more}):
        return [problem.id for problem in check_archive()]


class TestE036:
    @pytest.mark.parametrize("path", ["var/lake", "lake", "s3://bucket/lake", "file:///srv/lake"])
    def test_is_a_path_that_is_not_absolute(self, path):
        assert problems({"PATH": path}) == ["outbox.E036"]


class TestE037:
    def test_is_an_archive_that_takes_what_retention_keeps(self):
        assert problems({"PATH": "/srv/lake", "AFTER": timedelta(days=6)}) == ["outbox.E037"]


class TestNothing:
    def test_is_wrong_where_there_is_no_archive(self):
        assert problems(None) == []

    def test_is_wrong_with_an_archive_that_waits_as_long_or_longer(self):
        assert problems({"PATH": "/srv/lake"}) == []
        assert problems({"PATH": "/srv/lake", "AFTER": timedelta(days=7)}) == []
        assert problems({"PATH": "/srv/lake", "AFTER": timedelta(days=2)}, RETENTION=timedelta(days=1)) == []


class Registry(Apps):
    """Django's models, and a child of two parents."""

    def get_model(self, app_label, model_name=None, require_ready=True):
        return self.gift if app_label == "shop.Gift" else apps.get_model(app_label, model_name, require_ready)


@pytest.fixture
def gifts(monkeypatch):
    registry = Registry()
    names = {"__module__": __name__, "Meta": type("Meta", (), {"app_label": "shop", "apps": registry})}
    order = type("Paid", (models.Model,), {**names, "placed_at": models.DateTimeField()})
    parcel_names = {**names, "number": models.AutoField(primary_key=True), "seen_at": models.DateTimeField()}
    parcel = type("Parcel", (models.Model,), parcel_names)
    registry.gift = type("Gift", (order, parcel), {**names, "wish": models.TextField()})
    monkeypatch.setattr(job_config, "apps", registry)
    return order, parcel, registry.gift


@pytest.fixture
def outbox():
    class OrderPlaced(Message):
        order_id: int

        class Meta:
            topic = "orders"

    def outbox(**entry):
        given = {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", "AT": "placed_at", **entry}
        return {"TOPICS": {"orders": {}}, "PIPELINE": {"AUDIT": {"orders": given}}}

    return outbox


class TestE038:
    @pytest.mark.parametrize(
        ("entry", "text", "hint"),
        [
            ({"MODEL": "shop.Odrer"}, "has MODEL 'shop.Odrer'", 'Write "app.Model".'),
            ({"MODEL": "Order"}, "has MODEL 'Order'", 'Write "app.Model".'),
            ({"EXPECTS": "OrderPlaecd"}, "has EXPECTS 'OrderPlaecd', but no message type", "Write the name of the type"),
            (
                {"AT": "placed"},
                "has AT 'placed', but Order has no such field.",
                "Its date-time fields are invoiced_at, placed_at.",
            ),
            ({"MODEL": "outbox.Lane", "AT": ""}, "has MODEL 'outbox.Lane', whose primary key has several", "Name a model"),
            ({"AT": "customer"}, "has AT 'customer', which is not a date-time field of Order.", "Its date-time fields are"),
            ({"AT": "lines"}, "has AT 'lines', which is not a date-time field of Order.", "Its date-time fields are"),
            (
                {"MODEL": "shop.Gift", "AT": "seen_at"},
                "has AT 'seen_at', a field of another parent",
                "Its date-time fields are placed_at",
            ),
        ],
        ids=[
            "a model that is not there",
            "a model without its app",
            "a type nobody registered",
            "a field that is not there",
            "a key of several columns",
            "a text",
            "a relation",
            "a field of a second parent",
        ],
    )
    def test_finds_what_is_not_there_or_cannot_be_read(self, settings, found, outbox, gifts, entry, text, hint):
        settings.OUTBOX = outbox(**entry)

        (problem,) = found()

        assert problem.id == "outbox.E038"
        assert problem.msg.startswith(f'OUTBOX["PIPELINE"]["AUDIT"]["orders"] {text}')
        assert problem.hint.startswith(hint)

    def test_finds_all_that_is_wrong_with_an_entry(self, settings, found, outbox):
        settings.OUTBOX = outbox(EXPECTS="OrderPlaecd", AT="placed")

        assert [problem.id for problem in found()] == ["outbox.E038"] * 2

    @pytest.mark.parametrize("entry", [{}, {"AT": ""}, {"WHERE": "this is no SQL"}], ids=["whole", "no AT", "SQL is not read"])
    def test_is_quiet_otherwise(self, settings, found, outbox, entry):
        settings.OUTBOX = outbox(**entry)

        assert found() == []


@pytest.mark.django_db
class TestRowsOfAChild:
    def test_have_the_time_of_their_parent(self, gifts, outbox):
        with connection.schema_editor() as editor:
            for model in gifts:
                editor.create_model(model)
        parcel = gifts[1].objects.create(seen_at=timezone.now())
        gift = gifts[2].objects.create(parcel_ptr=parcel, seen_at=parcel.seen_at, placed_at=timezone.now(), wish="a kite")
        entry = AuditSettings("shop.Gift", "OrderPlaced", "b.wish LIKE 'a%' -- kites", "placed_at")

        with connection.cursor() as cursor:
            cursor.execute(of_business(business_of("gifts", entry)).query)
            rows = cursor.fetchall()

        assert rows == [(0, "gifts", f"shop.gift:{gift.pk}", gift.placed_at)]


@pytest.mark.django_db
class TestE056:
    def found(self):
        return [one for one in run_checks(tags=[Tags.database], databases=["default"]) if one.id == "outbox.E056"]

    @pytest.mark.parametrize("where", ["this is no SQL", "b.totla > 0", "b.id LIKE 'a%'", "no_such(b.id)", "b.id = 'a'"])
    def test_finds_a_condition_that_the_database_refuses(self, settings, outbox, where):
        settings.OUTBOX = outbox(WHERE=where)

        (problem,) = self.found()

        assert problem.msg.startswith(f'OUTBOX["PIPELINE"]["AUDIT"]["orders"] has WHERE {where!r}')
        assert "which database 'default' refuses: " in problem.msg

    @pytest.mark.parametrize("where", ["", "b.invoice LIKE 'a%'", "b.id > 1 -- of the shop", "b.placed_at > now() OR b.id < 3"])
    def test_is_quiet_otherwise(self, settings, outbox, where):
        settings.OUTBOX = outbox(WHERE=where)

        assert self.found() == []
