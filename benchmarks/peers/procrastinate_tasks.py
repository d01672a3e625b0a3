"""The job, which can be made once Django is set up."""

from procrastinate.contrib.django import app

from benchmarks.peers.procrastinate import take

handle = app.task(name="handle")(take)
