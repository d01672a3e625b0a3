import importlib.util

collect_ignore = [] if importlib.util.find_spec("pyspark") else ["test_outbox_archive.py"]
