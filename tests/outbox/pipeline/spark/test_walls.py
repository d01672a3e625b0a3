import subprocess
import sys

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


class TestThePipeline:
    def test_needs_no_django(self):
        outcome = subprocess.run([sys.executable, "-c", ALL_ROOMS], capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stderr

    def test_loads_nothing_heavy_before_a_job_runs(self):
        outcome = subprocess.run([sys.executable, "-c", PACKAGE], capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stderr
