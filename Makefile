# Two commands for a newcomer: `make train` and `make test`. Each sets up what it needs.
PYTHON ?= python3
# On a machine without a CPU build of torch at hand, this avoids gigabytes of CUDA:
#   make train PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test test-slow test-engines fuzz check format docs screenshots bench bench-local peers clean

train: $(READY)
	$(BIN)/paceline train

# Two per core of a small machine: most tests wait for processes that they start.
TEST_WORKERS ?= 4
# Threads that wait sleep: those of many processes would spin on the cores that others need.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile \
  --no-loadscope-reorder

test: $(READY)
	$(PYTEST) $(PYTEST_FLAGS)

test-slow: $(READY)
	$(PYTEST) -m slow $(PYTEST_FLAGS)

# Real Ray and Spark clusters in a lab: root, iproute2, Java 17. Each in an environment of its own.
ENGINES := ray spark
test-engines: $(ENGINES:%=.venv-%/.ready)
	for engine in $(ENGINES); do OMP_WAIT_POLICY=PASSIVE .venv-$$engine/bin/python -m pytest \
	  -m "slow or not slow" tests/engines $(PYTEST_FLAGS) || exit 1; done

.venv-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet $(PIP_FLAGS) -c constraints.txt torch
	.venv-$*/bin/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[mpi,$*,dev]"
	touch $@

# Damaged files and messages for every reader; what fails is printed with the number that repeats it.
FUZZ_SECONDS ?= 600
fuzz: $(READY)
	$(BIN)/python tests/fuzz/long.py --seconds $(FUZZ_SECONDS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, into site/: reference pages are made on the way, and a link that leads nowhere fails.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Pictures of the live page, from a real training on two nodes; needs Chromium.
screenshots: $(READY)
	$(BIN)/python docs/site/screenshots.py

bench: $(READY)
	$(BIN)/python -m benchmarks.overhead

bench-local: $(READY)
	$(BIN)/python -m benchmarks.local

# Other systems, installed in the cache and run beside Paceline for a short while.
# `make peers PEERS=all` takes them all (9 GB, Horovod is compiled); then `python -m benchmarks.beside`.
PEERS ?= accelerate lightning
peers: $(READY)
	$(BIN)/paceline peers install $(PEERS)
	$(BIN)/python -m benchmarks.beside --size small --place one --rounds 1 --out runs/beside

clean:
	rm -rf $(VENV) $(ENGINES:%=.venv-%) .pytest_cache .mypy_cache .ruff_cache build dist site *.egg-info src/*.egg-info

# torch first and alone: a resolver that sees a range instead of a pin may fetch CUDA builds.
$(READY): pyproject.toml development/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[mpi,serve,dev]" -e ./development
	touch $(READY)

$(VENV)/.docs: $(READY)
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[docs]"
	touch $(VENV)/.docs
