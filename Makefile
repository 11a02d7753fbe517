# The whole life of a checkout: `make run`, `make test`. Everything else is listed by `make help`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help run test test-all test-isa sanitize bench-quick lint format types contracts docs lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

run: $(INSTALLED) ## one agent turn with the embedded model, without and with speculation
	@$(BIN)/paceline run --compare --max-tokens 400 --file examples/token_store.py \
	  "Rename the class TokenStore to SessionStore. Answer with the whole file in one code block."

test: $(INSTALLED) ## the quick tests (under 6 minutes on two cores)
	$(BIN)/pytest

test-all: $(INSTALLED) ## every test, the long ones included
	$(BIN)/pytest -m "long or not long"

test-isa: $(INSTALLED) ## the quick tests with the kernels for AVX2, then in plain C++
	PACELINE_ISA=avx2 $(BIN)/pytest
	PACELINE_ISA=portable $(BIN)/pytest

sanitize: $(INSTALLED) ## the kernels' tests under AddressSanitizer and UBSan (builds for minutes, needs gcc)
	$(BIN)/python tests/sanitized.py

bench-quick: $(INSTALLED) ## a handful of benchmark tasks through three arms, and a report in bench/
	$(BIN)/paceline bench --quick --out bench/quick --json bench/quick/bench.json

lint: $(INSTALLED) ## ruff, mypy --strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

lock: $(INSTALLED) ## write requirements.lock from what .venv holds (torch without its local build tag)
	$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/^(torch==[0-9.]+)\+.*/\1/' > requirements.lock

clean: ## forget .venv and all build products
	rm -rf .venv build site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): requirements.lock pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Paceline needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24.1"
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
