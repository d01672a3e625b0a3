import subprocess
import sys


class TestThePackage:
    def test_gives_the_function_where_a_module_has_the_same_name(self):
        code = "import outbox.check_back.register; from outbox import check_back; check_back('orders')"

        outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert outcome.stderr == ""
