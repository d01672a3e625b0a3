"""Settings of one package: the business app, the package's apps and the settings that its documentation requires."""

import json
import os
from importlib import import_module

SECRET_KEY = "for-benchmarks"
DEBUG = False
USE_TZ = True
DATABASES = {"default": json.loads(os.environ["PEERS_DATABASE"])}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOGGING = {"version": 1, "root": {"level": "WARNING"}}

_package = import_module(f"benchmarks.peers.{os.environ['PEERS_PACKAGE']}")
INSTALLED_APPS = [*_package.APPS, "benchmarks"]
globals().update(_package.SETTINGS)
