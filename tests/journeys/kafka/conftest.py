"""These tests are collected only where Kafka's client is installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("confluent_kafka") else ["test_*.py"]
