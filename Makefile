# Every target makes its virtual environment when it is missing and reuses it when it is not.
PYTHON ?= python3
VENV := .venv
BENCH := .venv-bench
NUMBERS := .venv-numbers
# torch comes first and pinned, and the same constraints go to every later call: any other way pulls gigabytes.
PIP_FLAGS := --quiet --disable-pip-version-check -c constraints.txt
BUILD := pyproject.toml studies/pyproject.toml constraints.txt setup.py src/trueup/_core/_native.c

.PHONY: demo test test-numbers test-integrations test-spark pythons dist lint docs docs-run pictures reliability server-trial studies bench bench-versions bench-bars bench-shards bench-expressions bench-gate bench-monitor bench-clamping bench-repair bench-decisions bench-training bench-choice bench-clusters bench-coverage clean

demo: $(VENV)/.ready
	$(VENV)/bin/trueup demo

test: lint test-numbers
	$(VENV)/bin/python -m pytest --ignore=tests/integrations --ignore=src/trueup/integrations

# What works without torch, in an environment that does not have it; tests that need torch are skipped.
NUMBERS_PACKAGES := _core io metrics calibrators decisions monitor reports
test-numbers: $(NUMBERS)/.ready
	$(NUMBERS)/bin/python -m pytest $(NUMBERS_PACKAGES:%=tests/%) $(NUMBERS_PACKAGES:%=src/trueup/%) src/trueup/convert.py \
	  tests/contract tests/cli tests/test_package.py --ignore=tests/cli/test_commands.py

# trueup with other libraries: boosting, data frames, trackers, Lightning, transformers, torchmetrics, scikit-learn, ONNX.
test-integrations: $(VENV)/.integrations
	$(VENV)/bin/python -m pytest tests/integrations src/trueup/integrations docs/how-to tests/calibrators/test_expression.py \
	  --ignore=tests/integrations/test_spark.py --ignore=tests/integrations/test_ray.py \
	  --ignore=docs/how-to/spark.md --ignore=docs/how-to/ray.md

# Spark in local mode, which needs Java, with a million rows; and Ray Data. What is missing is skipped with a reason.
test-spark: $(VENV)/.spark
	TRUEUP_LONG=1 $(VENV)/bin/python -m pytest tests/integrations/test_spark.py tests/integrations/test_ray.py docs/how-to/spark.md docs/how-to/ray.md

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/pydoclint --quiet src/trueup

# Wheels and sdists of both distributions in dist/, from a clean copy.
dist: $(VENV)/.ready
	$(VENV)/bin/python tests/check_pythons.py --build-only $(OPTIONS)

# Each Python of 3.11 to 3.13 that is here, with a wheel built with and one without a compiler: a fresh environment, a
# smoke script and the demo. It ends with a line for each that says what was tried and what was skipped.
pythons: $(VENV)/.ready
	$(VENV)/bin/python tests/check_pythons.py --demo $(OPTIONS)

docs: $(VENV)/.docs
	$(VENV)/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

# Every tutorial and how-to page, also those that take minutes; TRUEUP_DATA names the folder of real data.
docs-run: $(VENV)/.ready
	TRUEUP_DOCS_RUN=1 $(VENV)/bin/python -m pytest docs/tutorials docs/how-to docs/gallery.md

# The notebooks and pictures of the manual, from its pages, and its screenshots (with Chromium).
pictures: $(VENV)/.ready
	$(VENV)/bin/python docs/notebooks.py
	$(VENV)/bin/python docs/pictures.py
	$(VENV)/bin/python docs/screenshots.py

# Every trial of tests/hard, longer than in the tests; writes docs/reliability.md.
reliability: $(VENV)/.ready
	$(VENV)/bin/python docs/reliability.py $(OPTIONS)

# The server among strangers, at full length: 3,400 half-open connections, 204 uploads, 20 clients, 117 kills, and
# requests generated from the OpenAPI document.
server-trial: $(VENV)/.ready
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) schemathesis
	TRUEUP_EFFORT=17 $(VENV)/bin/python -m pytest tests/hard/test_shared_server.py

# docs/papers from the tables in docs/studies; OPTIONS="--take NAME FOLDER" first takes those of a study's page.
studies: $(VENV)/.ready
	$(VENV)/bin/python docs/studies.py $(OPTIONS)

# Ours beside the peers, a process for each library; writes docs/benchmarks.md.
bench: $(BENCH)/.ready
	$(BENCH)/bin/python -m pytest benchmarks -q -p no:cacheprovider -o addopts= -o filterwarnings=
	$(BENCH)/bin/python benchmarks/page.py --out docs $(OPTIONS)

# This version beside the last one, or BASE=commit; writes docs/versions.md, and fails if anything became slower.
bench-versions: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/versions.py --out docs $(if $(BASE),--base $(BASE)) $(OPTIONS)

# The same in one process, turn by turn, each ratio judged by the bar it has to pass.
bench-bars: $(BENCH)/.ready
	$(BENCH)/bin/python benchmarks/metrics.py $(OPTIONS)
	$(BENCH)/bin/python benchmarks/calibrators.py $(OPTIONS)

# Expressions of calibrators: agreement with Python on 100,000 rows in DuckDB, SQLite, polars and node; speed in DuckDB.
bench-expressions: $(VENV)/.integrations
	$(VENV)/bin/python benchmarks/expressions.py agree
	$(VENV)/bin/python benchmarks/expressions.py speed

# Error rates of check, and coverage of the intervals of judge_rate; write docs/check-errors.csv, judges-coverage.csv.
bench-gate: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/gate.py $(OPTIONS)
	$(VENV)/bin/python benchmarks/judges.py $(OPTIONS)

bench-shards: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/shards.py $(OPTIONS)

bench-monitor: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/monitor.py $(OPTIONS)

# TRUEUP_DATA names the folder of networks and images; OPTIONS=--full runs every bar.
bench-clamping: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/clamping.py $(OPTIONS)

# TRUEUP_DATA as above; rows are kept in benchmarks/repair-rows.jsonl, so that a run can be stopped and taken up again.
bench-repair: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/repair.py --plan --out docs $(OPTIONS)

# TRUEUP_DATA names the folder of logits; beside MAPIE, TorchCP and NannyML where they are installed.
bench-decisions: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/decisions.py $(OPTIONS)

bench-training: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/training.py $(OPTIONS)

# The automatic choice beside the peers on many data sets; goes on where it was stopped; writes docs/choice.md.
bench-choice: $(BENCH)/.ready
	$(BENCH)/bin/python benchmarks/choice.py $(OPTIONS)

# How often intervals hold where rows come in clusters: 500 sets of 20 images.
bench-clusters: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/clusters.py $(OPTIONS)

# Coverage of the intervals and level of the tests of evaluate and compare in twelve worlds; writes docs/coverage.md.
bench-coverage: $(VENV)/.ready
	$(VENV)/bin/python benchmarks/interval_coverage.py $(OPTIONS)

$(VENV)/.ready: $(BUILD)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_FLAGS) torch==2.13.0
	$(VENV)/bin/pip install $(PIP_FLAGS) -e '.[dev]'
	$(VENV)/bin/pip install $(PIP_FLAGS) -e './studies[train]'
	touch $@

$(NUMBERS)/.ready: $(BUILD)
	test -x $(NUMBERS)/bin/python || $(PYTHON) -m venv $(NUMBERS)
	$(NUMBERS)/bin/pip install $(PIP_FLAGS) -e '.[report,parquet,hdf5]' pytest hypothesis pandas scikit-learn array-api-strict
	touch $@

$(VENV)/.integrations: $(VENV)/.ready
	$(VENV)/bin/pip install $(PIP_FLAGS) -e '.[integrations]'
	touch $@

$(VENV)/.spark: $(VENV)/.ready
	$(VENV)/bin/pip install $(PIP_FLAGS) -e '.[spark]'
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(VENV)/bin/pip install $(PIP_FLAGS) -e '.[docs]'
	touch $@

$(BENCH)/.ready: $(BUILD) benchmarks/requirements.txt benchmarks/requirements-nodeps.txt
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install $(PIP_FLAGS) torch==2.13.0
	$(BENCH)/bin/pip install $(PIP_FLAGS) -r benchmarks/requirements.txt
	$(BENCH)/bin/pip install $(PIP_FLAGS) --no-deps -r benchmarks/requirements-nodeps.txt
	$(BENCH)/bin/pip install $(PIP_FLAGS) -e .
	$(BENCH)/bin/pip install $(PIP_FLAGS) -e './studies[train]'
	touch $@

clean:
	rm -rf $(VENV) $(BENCH) $(NUMBERS) build site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info studies/src/*.egg-info src/trueup/_core/*.so
