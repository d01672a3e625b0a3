import subprocess
import sys

import pytest

ALL_ROOMS = """
import importlib, pkgutil, sys
import outbox.pipeline.spark
for module in pkgutil.walk_packages(outbox.pipeline.spark.__path__, "outbox.pipeline.spark."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name.split(".")[0] in {"pyspark", "pyarrow", "numpy", "pandas"}, error
loaded = [name for name in sys.modules if name.split(".")[0] in {"django", "celery", "rest_framework"}]
assert not loaded, loaded
"""

PACKAGE = """
import sys
import outbox.pipeline.spark, outbox.pipeline.spark.config
assert not {"pyspark", "pandas", "numpy", "pyarrow"} & set(sys.modules)
"""

AT_AN_EXECUTOR = """
import sys
from pathlib import Path
if {without}:
    sys.modules[{without}] = None
import outbox.pipeline.spark.{module}
from outbox.pipeline.spark.session import ROOT, SHIPPED_FILES
shipped = {{path for pattern in SHIPPED_FILES for path in (ROOT / "outbox").glob(pattern)}}
loaded = {{name: Path(module.__file__) for name, module in sys.modules.items() if name.split(".")[0] == "outbox"}}
assert not set(loaded.values()) - shipped, loaded
"""


class TestThePipeline:
    def test_needs_no_django(self):
        outcome = subprocess.run([sys.executable, "-c", ALL_ROOMS], capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stderr

    def test_loads_nothing_heavy_before_a_job_runs(self):
        outcome = subprocess.run([sys.executable, "-c", PACKAGE], capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stderr

    @pytest.mark.parametrize(("module", "without"), [("audit", "psycopg"), ("readers", "")])
    def test_needs_at_an_executor_only_what_is_sent_there(self, module, without):
        code = AT_AN_EXECUTOR.format(module=module, without=repr(without))

        outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stderr
