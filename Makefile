# make train: set up and run the main job.   make test: set up and run lint, types, docs and tests.
# make train installs only the packages of the job; make test adds the others to the same virtual environment.
# make test TORCH=2.15.0: the tests with another torch than that of constraints.txt; make core TORCH=2.15.0: only
# those of the core. Each torch has a virtual environment of its own; types are checked with the pinned one.
PYTHON ?= python3.11
VENV := .venv$(TORCH:%=-%)
BIN := $(VENV)/bin
# A stamp exists only after its whole installation has succeeded: make repeats one that was interrupted.
TRAIN := $(VENV)/.train
READY := $(VENV)/.ready
PIP = $(BIN)/pip install --constraint $(VENV)/constraints.txt --editable
# Two files of tests at a time keep two cores busy: nine tenths of their time is used.
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

export OMP_NUM_THREADS := 1
# Else every process of the tests would compile zeropp, and every worker the tests, again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test core lint types docs tests clean

train: $(TRAIN)
	$(BIN)/zeropp demo

# Types beside the tests: one process, for as long as the workers of the tests need to collect them.
test: $(if $(TORCH),,lint docs)
	$(MAKE) --jobs 2 $(if $(TORCH),,types) tests

core: $(READY)
	$(PYTEST) tests/comm tests/cpu tests/fsdp2 tests/quant tests/test_*.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Without warnings: no docstring that names a parameter which is not there, no link to nowhere. (With --quiet,
# mkdocs would not count them.) The variable keeps Material's notice that its maintenance ends out of the log;
# mkdocs.yml says why it is used.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tests: $(READY)
	tests/install_chromium
	$(PYTEST)

$(TRAIN): pyproject.toml constraints.txt
	@echo "Installing torch, numpy, numba, rich, tyro and pyroute2 into $(VENV): about 22 packages, 1.2 GB (more with CUDA)."
	$(PYTHON) -m venv $(VENV)
	sed '$(TORCH:%=s/^torch==.*/torch==%/;/^triton==/d)' constraints.txt > $(VENV)/constraints.txt
	$(PIP) '.[cli,cpu,lab]'
	touch $@

$(READY): $(TRAIN)
	@echo "Adding the packages of lint, types, docs and tests to $(VENV): about 110 more, 1.6 GB."
	$(PIP) '.[cli,cpu,gpu,lab,tensorboard,hf,hf-data,interop,docs,dev]'
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
