import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from django.conf import settings as django_settings
from django.urls import reverse

from outbox.models import CheckBack, State
from tests.check_back_secrets import OTHER_SECRET, SECRET
from tests.factories import BatchFactory
from tests.outbox.api.questions import question_of
from tests.outbox.check_backs.halves import half_of

PAGE = "docs/how-to/half-first.md"


def run_the_recipe(**variables):
    for program in ("bash", "openssl", "curl"):
        assert shutil.which(program), f"the recipe needs {program}: install it"
    recipe = re.search(r"```bash\n(.*?)```", (Path(django_settings.BASE_DIR) / PAGE).read_text(), re.DOTALL).group(1)
    environment = {**os.environ, "no_proxy": "*", **variables}
    return subprocess.run(["bash", "-euc", recipe], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.django_db(transaction=True)
class TestTheRecipe:
    def test_brings_the_answer(self, live_server):
        question = question_of(half_of(BatchFactory(state=State.SENT, half_ids=["h"])), key="Müller & Söhne's")

        outcome = run_the_recipe(
            URL=live_server.url + reverse("outbox:check-back"),
            SECRET=SECRET,
            BODY=json.dumps(question, ensure_ascii=False),
        )

        assert outcome.stderr == ""
        assert json.loads(outcome.stdout)["answer"] == "COMMIT"
        assert CheckBack.objects.get().request_id.startswith("msg_")

    def test_is_refused_with_a_secret_that_is_not_the_endpoints(self, live_server):
        outcome = run_the_recipe(URL=live_server.url + reverse("outbox:check-back"), SECRET=OTHER_SECRET)

        assert "does not match any" in json.loads(outcome.stdout)["detail"]

    def test_says_which_variable_it_needs(self):
        outcome = run_the_recipe(SECRET="")

        assert outcome.returncode != 0
        assert "SECRET" in outcome.stderr
