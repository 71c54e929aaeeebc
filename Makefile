# Needs Python 3.11 or newer and make. `make` alone tells what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# nvidia-smi without a driver says so on its standard output: only a success counts.
CARD := $(shell names=$$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) && echo "$$names" | head -n 1)
# The YAML for this machine: the card's own ("NVIDIA GeForce RTX 4090" is rtx4090), else any card's, else the CPU's.
CARD_WORDS := $(shell echo '$(CARD)' | tr A-Z a-z | sed -E 's/(nvidia|tesla|geforce) //g; s/rtx a/a/; s/rtx ([0-9])/rtx\1/; s/[ -].*//')
PRESET := $(if $(wildcard accelerate_configs/$(CARD_WORDS).yaml),$(CARD_WORDS),conservative)
ACCELERATE_CONFIG ?= accelerate_configs/$(if $(CARD),$(PRESET),cpu).yaml
RECIPE ?= recipes/quickstart.yaml
FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help environment train test test-slow check format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

environment: $(VENV)/.installed ## make .venv and install requirements.txt

train: $(VENV)/.installed ## train the quickstart (RECIPE=recipes/own_text.yaml FLAGS="--data_files my.txt" for another)
	$(BIN)/accelerate launch --config_file $(ACCELERATE_CONFIG) train.py --recipe $(RECIPE) $(FLAGS)

test: $(VENV)/.installed-dev ## the tests, under 6 minutes on 2 cores
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.installed-slow ## campaigns of kills and parities
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.installed-dev ## format, lint, layout rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest tests/test_layout.py

format: $(VENV)/.installed-dev ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv; data/ and runs/ stay
	rm -rf $(VENV)

# torch goes first and alone, so that no other package's range chooses its build.
$(VENV)/.installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=python3.12 ..." or 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

$(VENV)/.installed-slow: $(VENV)/.installed-dev requirements-slow.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-slow.txt
	touch $@
