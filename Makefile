# Gossamer: every target makes its own environment (.venv) when it is missing.
# A different interpreter: make test PYTHON=python3.12

PYTHON ?= python3
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all chromium lint bench bench-all clean

BIN := .venv/bin
STAMP := .venv/.installed
BENCH := .venv/.bench
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# No look for a newer pyright on every run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

DEMO := runs/demo

GOSSAMER := $(BIN)/gossamer
TRAIN := $(GOSSAMER) train --data tiny
START := --set saver.pretrain_model=$(DEMO)/start
BOTH := --runtime onnxruntime --runtime gossamer
RUNS := $(DEMO)/dense $(DEMO)/levels $(DEMO)/two-of-four $(DEMO)/filters $(DEMO)/int8

demo: $(STAMP) ## make a ResNet-18 sparse, smaller and faster in four ways, on digits, and compare (about six minutes)
	@rm -rf $(DEMO)
	@echo; echo "1. A ResNet-18, trained on scikit-learn's digits: what all the others start from"
	$(TRAIN) configs/cls/resnet/res18.yaml --set saver.save_dir=$(DEMO)/start
	@echo; echo "2. Dense, trained for as long again: what the others are compared with"
	$(TRAIN) configs/cls/resnet/res18.yaml --set saver.save_dir=$(DEMO)/dense $(START)
	@echo; echo "3. Nine weights in ten are zero, in rising levels"
	$(TRAIN) configs/cls/resnet/res18_amba_sparse.yaml --set saver.save_dir=$(DEMO)/levels $(START)
	@echo; echo "4. 2:4, two zeros in every four neighbours, for GPUs"
	$(TRAIN) configs/cls/resnet/res18_ampere_sparse.yaml --set saver.save_dir=$(DEMO)/two-of-four $(START)
	@echo; echo "5. Half of the filters are zero as a whole"
	$(TRAIN) configs/cls/resnet/res18_filters_sparse.yaml --set saver.save_dir=$(DEMO)/filters $(START)
	@echo; echo "6. Trained for 8-bit integers"
	$(TRAIN) configs/cls/resnet/res18_int8.yaml --set saver.save_dir=$(DEMO)/int8 $(START)
	@echo; echo "7. What it costs in accuracy (top1, in percent), with equal epochs"
	$(GOSSAMER) compare $(RUNS)
	@echo "8. Smaller files, each read back and checked"
	$(GOSSAMER) export $(DEMO)/dense --format onnx
	$(GOSSAMER) export $(DEMO)/levels --format onnx --format bitmask
	$(GOSSAMER) export $(DEMO)/two-of-four --format sparse24 --half
	$(GOSSAMER) export $(DEMO)/filters --format thin
	$(GOSSAMER) export $(DEMO)/int8 --format onnx
	@echo; echo "9. Which of them are faster? Zeros pay off in a runtime that skips them, other savings in both"
	$(GOSSAMER) benchmark $(DEMO)/dense/model.onnx $(DEMO)/levels/model.onnx $(DEMO)/filters/model-thin.onnx \
	  $(DEMO)/int8/model.onnx $(BOTH) --seconds 14 --output $(DEMO)/speed.json
	@echo; echo "10. The same networks, dense and with nine tenths zeros, at 224×224"
	$(GOSSAMER) export $(DEMO)/dense --format onnx --input 1,3,224,224 --output $(DEMO)/dense-224
	$(GOSSAMER) export $(DEMO)/levels --format onnx --input 1,3,224,224 --output $(DEMO)/levels-224
	$(GOSSAMER) benchmark $(DEMO)/dense-224/model.onnx $(DEMO)/levels-224/model.onnx $(BOTH) --seconds 8 \
	  --output $(DEMO)/speed-224.json
	@echo; echo "11. The sparse network as an engine, compared with itself dense in torch, at 32×32 and at 224×224"
	$(GOSSAMER) compile $(DEMO)/levels --output $(DEMO)/levels.gossamer
	$(GOSSAMER) compile $(DEMO)/levels --input 1,3,224,224 --output $(DEMO)/levels-224.gossamer
	@echo; echo "12. All of it on one page, to open in a browser"
	$(GOSSAMER) report $(RUNS) --benchmark $(DEMO)/speed.json --benchmark $(DEMO)/speed-224.json \
	  --output $(DEMO)/report.html

test: lint chromium ## style, types, imports, then the fast tests
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

lint: $(STAMP) ## style, types and imports only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(BENCH) ## the benchmarks that take minutes
	@$(BIN)/python -m benchmarks

bench-all: $(BENCH) ## every benchmark; FASHION_MNIST=folder PHOTOGRAPHS=folder for those that need them
	@$(BIN)/python -m benchmarks --all $(if $(FASHION_MNIST),--data '$(FASHION_MNIST)') \
	  $(if $(PHOTOGRAPHS),--photographs '$(PHOTOGRAPHS)')

clean: ## remove the environment, caches and build output
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two test workers share the processors; one thread each keeps them out of each other's way.
test test-all: export OMP_NUM_THREADS ?= 1

# What benchmarks compare with; where it cannot be had, they say so and leave it out.
$(BENCH): $(STAMP)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]' || \
	  echo "OpenVINO could not be installed: the benchmarks run without it"
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Gossamer needs Python 3.11 or newer, and '$(PYTHON)' is not; name one, as in: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "Installing Gossamer and its tools into .venv (the first time takes some minutes; PyTorch is large)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' \
	  | awk '$$1 == "Downloading" { print "  " $$2, $$3, $$4; fflush() } /^Installing collected/ { print "  unpacking …"; fflush() }'
	@touch $@
