"""One message out of the lake, and its page in the admin."""

from uuid import UUID
from zoneinfo import ZoneInfo

import pyarrow.parquet as pq
import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from outbox import database
from outbox.message import Message
from outbox.models import MessageRow
from outbox.pipeline.spark import LakeError
from outbox.pipeline.spark.lake import find_message
from tests.factories import message_id
from tests.outbox.pipeline.spark.archive.conftest import FIRST, SECOND
from tests.outbox.pipeline.spark.archive.looks import files_of, flip_a_bit

PAGE = "admin:outbox_messagerow_change"
LIST = "admin:outbox_messagerow_changelist"


class TestFindMessage:
    def test_gives_the_message_and_who_handled_it_and_opens_no_files_of_other_days(self, archive, lake, ids):
        archive()
        for file in lake.committed()[1].frames["messages"].files:
            (lake.root / file).unlink()

        found = find_message(lake, UUID(ids[2]))

        assert found.commit == f"{FIRST}.a1"
        assert found.message["message_id"] == ids[2]
        assert (found.message["key"], found.message["body"], found.message["number"]) == ("Zoë 3", b'{"n": 3}', 3)
        assert [row["consumer_group"] for row in found.handled] == ["cart"]
        assert find_message(lake, message_id()) is None
        assert find_message(lake, UUID(ids[0][:-1] + ("0" if ids[0][-1] != "0" else "1"))) is None
        assert find_message(lake, UUID(int=2**128 - 1)) is None

    def test_gives_each_handling_once_though_several_commits_have_it(self, archive, lake, ids):
        with database.connect("default") as reader, reader.transaction():  # days are committed, and cannot be deleted
            reader.execute("SELECT count(*) FROM outbox_message")
            archive()

        found = find_message(lake, UUID(ids[2]))

        assert len([commit for commit in lake.committed() if commit.frames["inbox"].rows]) == 2
        assert [row["consumer_group"] for row in found.handled] == ["cart"]

    def test_names_the_file_that_is_no_parquet(self, archive, lake, ids):
        archive()
        file, size = next(iter(lake.committed()[0].frames["messages"].files.items()))
        (lake.root / file).write_bytes(b"x" * size)

        with pytest.raises(LakeError, match=rf"The file {file} of {FIRST}\.a1"):
            find_message(lake, UUID(ids[0]))

    def test_names_the_file_of_which_a_bit_has_flipped(self, archive, lake, ids):
        archive()
        file = files_of(lake)[0]
        flip_a_bit(file)

        with pytest.raises(LakeError, match=rf"The file {file.relative_to(lake.root)} of {FIRST}\.a1"):
            find_message(lake, UUID(ids[0]))


class TestTheFiles:
    def test_are_sorted_so_that_few_row_groups_can_hold_an_id(self, archive, lake, ids):
        archive(before=SECOND)

        spans = []
        for file in lake.committed()[0].frames["messages"].files:
            metadata = pq.read_metadata(lake.root / file)
            for group in range(metadata.num_row_groups):
                statistics = metadata.row_group(group).column(0).statistics
                spans.append((statistics.min, statistics.max))

        assert sum(low <= ids[3] <= high for low, high in spans) == 1


@pytest.fixture
def client(ids):
    user = User.objects.create_user("ada", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="view_messagerow"))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def archived(archive, lake, settings):
    """All of it archived, where the settings say."""
    lake.root.mkdir()
    (lake.root.parent / "default").symlink_to(lake.root)
    settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": str(lake.root.parent)}}}
    archive()


@pytest.fixture
def masked(ids, monkeypatch):
    """All messages are of a type that masks the field `n`."""
    monkeypatch.setattr("outbox.message.registered", {})

    class Masked(Message):
        n: int

        class Meta:
            topic = "orders"
            mask = ["n"]

    MessageRow.objects.update(headers='{"ce-type": "Masked", "content-type": "application/json"}')


class TestThePage:
    def test_shows_a_message_that_is_in_the_lake_alone_to_which_a_search_for_its_id_leads(self, archived, client, ids):
        page = client.get(reverse(PAGE, args=[ids[2]]))

        assert page.status_code == 200
        for text in ("archived", "Zoë 3", "3 in lane 1", "Handled by <bdi>cart</bdi>", f"{FIRST}.a1", "sent"):
            assert text in page.text
        found = client.get(reverse(LIST), {"q": f" {ids[2]} "})

        assert found.headers["Location"] == reverse(PAGE, args=[ids[2]])

    @pytest.mark.parametrize("use_tz", [True, False])
    def test_shows_local_times(self, use_tz, archived, client, lake, ids, settings):
        settings.USE_TZ, settings.TIME_ZONE = use_tz, "America/New_York"
        found = find_message(lake, UUID(ids[2]))

        page = client.get(reverse(PAGE, args=[ids[2]]))

        for at in (found.message["created_at"], found.message["claimed_at"], found.handled[0]["handled_at"]):
            assert f"{at.astimezone(ZoneInfo('America/New_York')):%Y-%m-%d %H:%M:%S.%f}" in page.text

    def test_says_that_there_is_no_such_message_or_why_the_lake_cannot_be_read(self, archived, client, lake, ids):
        page = client.get(reverse(PAGE, args=[ids[0][:-4] + "0000"]))

        assert page.status_code == 404
        assert "Neither the database nor the archive has this message. Its id is of 2001-02-03" in page.text

        next((lake.root / "_manifests").iterdir()).write_text("{")

        page = client.get(reverse(PAGE, args=[ids[2]]))

        assert page.status_code == 503
        assert "The archive cannot be read" in page.text
        assert "The manifest" in page.text

    def test_is_not_for_everybody(self, archived, client, ids):
        User.objects.get().user_permissions.clear()

        assert client.get(reverse(PAGE, args=[ids[2]])).status_code == 403
        assert client.get(reverse(LIST), {"q": ids[2]}).status_code == 403

    def test_hides_what_is_masked(self, masked, archived, client, ids):
        page = client.get(reverse(PAGE, args=[ids[2]])).text
        User.objects.get().user_permissions.add(Permission.objects.get(codename="view_body"))
        whole = client.get(reverse(PAGE, args=[ids[2]])).text

        assert "&quot;n&quot;: 3" not in page
        assert "&quot;n&quot;: 3" in whole

    def test_is_as_ever_where_there_is_no_archive(self, client, ids, settings):
        assert client.get(reverse(PAGE, args=[ids[0][:-4] + "0000"])).status_code == 302
        assert client.get(reverse(LIST), {"q": ids[0][:-4] + "0000"}).status_code == 200
