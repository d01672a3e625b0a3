"""These tests are collected only where PySpark and Kafka's client are installed."""

import importlib.util

collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("pyspark", "confluent_kafka"))) else ["test_*.py"]
