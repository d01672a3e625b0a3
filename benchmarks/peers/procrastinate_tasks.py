"""The job, defined after Django's setup."""

from procrastinate.contrib.django import app

from benchmarks.peers.procrastinate import take

handle = app.task(name="handle")(take)
