# make demo   train AdLoCo on this Python's own standard library, and draw the report
# make test   the tests; `make slow` has the long ones
# make check  lint, format, types, and the files for GitHub against their schemas
# make dist   wheel and sdist, and the wheel tried in an empty environment
# make parity  the same numbers as PyTorch's, which this installs
# make gpu    measures this engine on one GPU, with the jax and torch for it, which this installs
# make conformance  the lines of docs/conformance.md: others' numbers beside ours
# make docs   the documentation site in docs/_build/html, with notebooks/ executed
# make faults  kills, starves and corrupts runs for hours, and prints what came of it
# make mutants  makes realistic mistakes, one at a time, and prints which of them no test notices
#
# PYTHON=<interpreter> chooses the Python, VENV=<folder> where its environment lives.

PYTHON ?= python3
VENV ?= .venv
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
INSTALLED := $(VENV)/installed-$(VERSION)
WITH := $(VENV)/installed-$(VERSION)-with
RUN := $(VENV)/bin/python
# The newest jax needs Python 3.12, so 3.11 has versions of its own.
CONSTRAINTS := constraints/py$(if $(filter 311,$(VERSION)),311,312).txt
# Modules that nothing imports are not compiled: a third of the time.
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# Much of a test is tracing, on one core; a process of them all takes up to 3 GiB.
PARALLEL := -n auto --maxprocesses=4 --dist=worksteal

SCHEMA := $(VENV)/bin/check-jsonschema --default-filetype yaml --builtin-schema

.PHONY: demo test slow test-core parity gpu conformance docs check dist extras faults mutants clean

demo: $(INSTALLED)
	$(RUN) -m adloco_jax.main --config configs/quickstart.py

test: $(INSTALLED)
	$(RUN) -m pytest -q $(PARALLEL)

slow: $(INSTALLED)
	$(RUN) -m pytest -q $(PARALLEL) -m slow

test-core: $(INSTALLED)
	$(RUN) -m pytest -q $(PARALLEL) tests/core_*_test.py

parity: $(WITH)-parity
	$(RUN) -m pytest -q tests/parity_*_test.py

gpu: $(WITH)-gpu
	$(RUN) scripts/gpu.py

conformance: $(WITH)-conformance
	$(RUN) -m pytest -q tests/conformance_test.py

docs: $(WITH)-docs
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 docs docs/_build/html

check: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyrefly check --python-interpreter-path $(RUN)
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff

dist: $(WITH)-dist
	rm -rf build dist
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*
	PYTHON=$(PYTHON) scripts/try_wheel.sh $(CONSTRAINTS)

faults: $(INSTALLED)
	$(RUN) scripts/faults.py

mutants: $(INSTALLED)
	$(RUN) scripts/mutants.py

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) -e '.[test]'
	touch $@

# Those of the targets above at once, so that none installs while another runs.
extras: $(INSTALLED)
	$(INSTALL) -e '.[parity,conformance,dist,docs]'
	touch $(foreach extra,parity conformance dist docs,$(WITH)-$(extra))

$(WITH)-%: $(INSTALLED)
	$(INSTALL) -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build dist runs docs/_build
