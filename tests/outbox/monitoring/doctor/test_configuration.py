import pytest

from outbox.monitoring import doctor
from outbox.monitoring.doctor import check_configuration

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class TestConfiguration:
    def test_is_well_where_the_system_checks_find_nothing(self, about):
        assert about(check_configuration, "configuration") == [("ok", "the system checks found no problems")]

    def test_gives_what_they_find(self, settings, about):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {**settings.OUTBOX["TOPICS"], "a.b": {}}}

        (found,) = about(check_configuration, "configuration")

        assert found == ("error", "OUTBOX[\"TOPICS\"] has a topic called 'a.b'.")

    def test_leaves_out_what_the_project_has_silenced(self, settings, about):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {**settings.OUTBOX["TOPICS"], "a.b": {}}}
        settings.SILENCED_SYSTEM_CHECKS = ["outbox.E002"]

        assert about(check_configuration, "configuration") == [("ok", "the system checks found no problems")]

    def test_is_all_there_is_to_look_at_where_settings_are_wrong(self, settings):
        settings.OUTBOX = {"TOPIKS": {}}

        assert [finding.obj for finding in doctor.check()] == ["configuration"]
