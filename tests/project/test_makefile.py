"""What the Makefile says of the tests."""

import re

from django.conf import settings

MAKEFILE = (settings.BASE_DIR / "Makefile").read_text()


class TestOnRocketMQ:
    def test_names_all_folders_with_such_tests(self):
        [named] = re.findall("^ON_ROCKETMQ = (.*)$", MAKEFILE, re.MULTILINE)
        folders = [settings.BASE_DIR / name for name in named.split()]

        files = [path for path in (settings.BASE_DIR / "tests").rglob("*.py") if "pytest.mark." + "rocketmq" in path.read_text()]
        elsewhere = [path for path in files if not any(folder in path.parents for folder in folders)]

        assert files
        assert elsewhere == []
