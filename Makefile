# Gossamer: every target makes its own environment (.venv) when it is missing.
# A different interpreter: make test PYTHON=python3.12

PYTHON ?= python3
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all chromium lint bench bench-all clean

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# No look for a newer pyright on every run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

DEMO := runs/demo

demo: $(STAMP) ## train a ResNet-18 on digits, make it sparse in two ways, see what that costs and is worth (four minutes)
	@rm -rf $(DEMO)
	@echo; echo "1. A dense ResNet-18, trained on scikit-learn's digits"
	$(BIN)/gossamer train configs/cls/resnet/res18.yaml --data tiny --set saver.save_dir=$(DEMO)/dense
	@echo; echo "2. Sparse by levels, up to nine zeros in ten weights"
	$(BIN)/gossamer train configs/cls/resnet/res18_amba_sparse.yaml --data tiny --set saver.save_dir=$(DEMO)/levels \
	  --set saver.pretrain_model=$(DEMO)/dense --set sparsity.scheduler.kwargs.do_sparse_analysis=true
	@echo; echo "3. Sparse by 2:4, two zeros in every four neighbours"
	$(BIN)/gossamer train configs/cls/resnet/res18_ampere_sparse.yaml --data tiny --set saver.save_dir=$(DEMO)/two-of-four \
	  --set saver.pretrain_model=$(DEMO)/dense
	@echo; echo "4. What it costs"
	$(BIN)/gossamer compare $(RUNS)
	@echo "5. What it is worth: smaller files, and programs for onnxruntime, each read back and checked"
	$(BIN)/gossamer export $(DEMO)/dense --format onnx
	$(BIN)/gossamer export $(DEMO)/levels --format onnx --format bitmask
	$(BIN)/gossamer export $(DEMO)/two-of-four --format sparse24 --half
	@echo; echo "6. Is it faster? Zeros alone are not"
	$(BIN)/gossamer benchmark $(DEMO)/dense/model.onnx $(DEMO)/levels/model.onnx --seconds 5
	@echo; echo "7. One page about all of it, to open in a browser, with what each layer can spare"
	$(BIN)/gossamer report $(RUNS) --sensitivity -o $(DEMO)/report.html

RUNS = $(DEMO)/dense $(DEMO)/levels $(DEMO)/two-of-four

test: lint chromium ## style, types, layers, then the tests that take seconds
	$(PYTEST) -m "not slow"

test-all: lint chromium ## the same with the slow tests
	$(PYTEST)

# The report is tested in the system's browser, one of those that tests/browser/chromium.py takes; where none can be
# had, or installing takes too long, those tests are skipped and say so.
GET := DEBIAN_FRONTEND=noninteractive timeout 240 apt-get -qq

chromium:
	@browser="$$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)"; \
	if [ -n "$$browser" ] && command -v chromedriver >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing Chromium and its driver, for the tests of the report"; \
	  { $(GET) install -y chromium chromium-driver || \
	    { $(GET) update && $(GET) install -y chromium chromium-driver; }; } >/dev/null 2>&1 || \
	  echo "Chromium could not be installed: the tests of the report in a browser are skipped"; \
	else echo "Chromium is missing and cannot be installed here: the tests of the report in a browser are skipped"; fi

lint: $(STAMP) ## style, types and layers only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(STAMP) ## the benchmarks that take minutes
	@$(BIN)/python -m benchmarks

bench-all: $(STAMP) ## every benchmark; FASHION_MNIST=folder PHOTOGRAPHS=folder for those that need them
	@$(BIN)/python -m benchmarks --all $(if $(FASHION_MNIST),--data '$(FASHION_MNIST)') \
	  $(if $(PHOTOGRAPHS),--photographs '$(PHOTOGRAPHS)')

clean: ## remove the environment, caches and build output
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two test workers share the processors; one thread each keeps them out of each other's way.
test test-all: export OMP_NUM_THREADS ?= 1

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Gossamer needs Python 3.11 or newer, and '$(PYTHON)' is not; name one, as in: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "Installing Gossamer and its tools into .venv (the first time takes some minutes; PyTorch is large)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' \
	  | awk '$$1 == "Downloading" { print "  " $$2, $$3, $$4; fflush() } /^Installing collected/ { print "  unpacking …"; fflush() }'
	@touch $@
