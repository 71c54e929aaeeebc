# Needs Python 3.11 or newer and make. `make` alone tells what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# GPUS=0,1 are the only cards that a target uses, numbered as nvidia-smi does.
GPUS ?=
# A value as one word of the shell.
quoted = '$(subst ','\'',$(1))'
NVIDIA_SMI = nvidia-smi $(if $(GPUS),--id=$(call quoted,$(GPUS)))
ifneq ($(GPUS),)
export CUDA_DEVICE_ORDER := PCI_BUS_ID
export CUDA_VISIBLE_DEVICES := $(GPUS)
endif
# nvidia-smi without a driver says so on its standard output: only a success counts.
CARD := $(shell names=$$($(NVIDIA_SMI) --query-gpu=name --format=csv,noheader 2>/dev/null) && echo "$$names" | head -n 1)
# The YAML for a number of these cards, the CPU's where there is none.
preset = accelerate_configs/$(shell $(PYTHON) -c 'import sys; from ursa_minor.base import gpus; \
	print(gpus.preset(sys.argv[1], int(sys.argv[2])))' $(call quoted,$(CARD)) $(call quoted,$(1))).yaml
ACCELERATE_CONFIG ?= $(call preset,1)
# What `make ddp-train` takes: all cards of this machine; two processes where there is none.
NGPUS ?= $(if $(CARD),$(shell $(NVIDIA_SMI) --query-gpu=name --format=csv,noheader | grep -c .),2)
DDP_CONFIG = $(call preset,$(NGPUS))
# What --multi_gpu adds to a single card's YAML.
MULTI_GPU = $(if $(findstring _x$(NGPUS).yaml,$(1)),,$(if $(filter 1,$(NGPUS)),,--multi_gpu --num_processes $(call quoted,$(NGPUS))))
RECIPE ?= recipes/quickstart.yaml
# Several cards are for a larger model, where nobody names a recipe.
DDP_RECIPE = $(if $(CARD),$(if $(filter file,$(origin RECIPE)),recipes/gpt2_124m_openwebtext.yaml,$(value RECIPE)),$(value RECIPE))
SECONDS ?= 60
# Words of the shell: FLAGS='--run_name "a b"'.
FLAGS ?=
# The folder of one run for `make stop`, as it is: make would read the $ in a name.
unexport RUN
export STOP_RUN := $(value RUN)
# uv is used where it is installed.
UV := $(shell command -v uv || ls $(BIN)/uv 2>/dev/null)
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check)
# Of the tests: one a core; each takes a gigabyte.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 16))')

.DEFAULT_GOAL := help
.PHONY: help environment venv locked uv notebook lock uvlock check-setup gpu-status gpu-hot presets card-report train post-train ddp-train stop kill-gpu test test-slow test-post test-faults check format clean

help: ## this list
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{sub(/ .*/, "", $$1); printf "make %-14s %s\n", $$1, $$2}'

environment venv: $(if $(LOCKED),locked,$(VENV)/.installed) ## make .venv and install requirements.txt (LOCKED=1: uv.lock's versions and hashes, by uv)
	@echo "$(VENV) is ready. Next: source $(VENV)/bin/activate"

locked:
	$(if $(UV),,$(error uv is not installed: https://docs.astral.sh/uv/))
	$(UV) sync --locked --no-config
	touch $(VENV)/.installed

uv: $(VENV)/.installed ## install uv into .venv, which the other targets then use
	$(INSTALL) uv

notebook: $(VENV)/.installed-notebook ## open notebooks/ in JupyterLab
	$(BIN)/jupyter lab notebooks

lock uvlock: ## write uv.lock anew, with hashes, from the public index only
	$(if $(UV),,$(error uv is not installed; make uv))
	env -u UV_INDEX -u UV_DEFAULT_INDEX -u UV_INDEX_URL -u UV_FIND_LINKS $(UV) lock --no-config --default-index https://pypi.org/simple

# As many as accelerate takes by itself, which then writes three lines about it.
THREADS = $(if $(CARD),,--num_cpu_threads_per_process $(shell $(BIN)/python -c 'import psutil; print(psutil.cpu_count(logical=False) or 1)'))

# accelerate launch without the traceback that it shows at Ctrl-C below the run's last line.
LAUNCH = $(BIN)/python -c 'import signal; signal.signal(signal.SIGINT, lambda *_: None); \
	from accelerate.commands.accelerate_cli import main; main()' launch --quiet

train: $(VENV)/.installed ## train the quickstart (RECIPE=recipes/own_text.yaml FLAGS="--data_files my.txt" for another)
	@echo accelerate launch --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)
	@$(LAUNCH) $(THREADS) --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)

post-train: $(VENV)/.installed-post ## pre-train a small GPT-2 on addition, then improve it by a checked reward (FLAGS: post_train.py's)
	$(BIN)/python scripts/addition.py
	$(BIN)/accelerate launch --quiet --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe recipes/addition.yaml
	$(BIN)/python post_train.py --config recipes/post/addition.yaml $(FLAGS)

ddp-train: $(VENV)/.installed ## train gpt2_124m_openwebtext on all cards (GPUS=0,1: on these); without a card, the quickstart on 2 CPU processes
ifeq ($(strip $(CARD)),)
	ACCELERATE_USE_CPU=true $(BIN)/torchrun --nproc_per_node $(call quoted,$(NGPUS)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)
else
	$(BIN)/accelerate launch --quiet --config_file $(DDP_CONFIG) $(call MULTI_GPU,$(DDP_CONFIG)) train.py --recipe $(call quoted,$(DDP_RECIPE)) $(FLAGS)
endif

stop kill-gpu: ## end this folder's runs, each after its checkpoint (RUN=runs/name: only that one); no other program on a card is touched
	@$(PYTHON) scripts/stop.py $${STOP_RUN:+"$$STOP_RUN"}

check-setup: $(VENV)/.installed ## what this machine is and lacks (FLAGS="--estimate --all_cards": what a run takes)
	$(BIN)/python check_setup.py $(FLAGS)

gpu-status: ## each card's use, memory, watts and temperature
	@table=$$($(NVIDIA_SMI) --query-gpu=index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu \
		--format=csv,noheader 2>/dev/null) && echo "$$table" | awk -F ', ' \
		'BEGIN {row = "%-4s %-32s %6s %12s %12s %10s %5s\n"; printf row, "card", "name", "use", "memory", "of", "power", "°C"} \
		{printf row, $$1, $$2, $$3, $$4, $$5, $$6, $$7}' || echo "no NVIDIA driver answers here"

gpu-hot: $(VENV)/.installed ## multiply on every card, to warm it up or to test it (SECONDS=60; 0: until Ctrl-C; GPUS=0,1)
	@$(BIN)/python scripts/gpu_hot.py $(call quoted,$(SECONDS))

presets: $(VENV)/.installed ## write accelerate_configs/, the tables of cards (ursa_minor/base/gpus.csv) and of keys (docs/knobs.md), notebooks/walkthrough.ipynb and the golden file of recipes anew
	$(BIN)/python benchmarks/estimate_cards.py --write >/dev/null
	$(BIN)/python scripts/keys_table.py
	$(BIN)/python scripts/resolved_recipes.py
	$(BIN)/python scripts/walkthrough_notebook.py

card-report: $(VENV)/.installed ## 5 minutes on your card: tokens/s, MFU, peak of GPT-2 124M, and the row to send us
	@PYTHON=$(BIN)/python bash benchmarks/first_card.sh report

test: $(VENV)/.installed-dev ## the tests, about 3 minutes on 2 cores
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS)

test-slow: $(VENV)/.installed-slow ## long tests: kills at random steps, comparisons with other programs
	$(BIN)/python -m pytest -m slow

test-post: $(VENV)/.installed-test-post ## what needs TRL: rewards, chat, TRL's command line with our files (3 minutes)
	$(BIN)/python -m pytest -m post

test-faults: $(VENV)/.installed-dev ## attacks: damage, kills, full disks, fuzz, servers that lie (FULL=1: all of it; SEED=7; TREE=another checkout)
	$(BIN)/python tests/fault_injection/run.py $(if $(FULL),--full) $(if $(TREE),--tree $(call quoted,$(TREE))) $(if $(SEED),--seed $(call quoted,$(SEED))) --json benchmarks/results/

check: $(VENV)/.installed-dev ## format, lint, spelling, types, shell scripts, layout rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	PATH=$(BIN):$$PATH shellcheck .ci/run scripts/*.sh benchmarks/*.sh
	$(BIN)/python -m pytest tests/test_layout.py

format: $(VENV)/.installed-dev ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv; data/ and runs/ stay
	rm -rf $(VENV)

# torch goes first and alone, so that no other package's range chooses its build.
$(VENV)/.installed: requirements.txt constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=python3.12 ..." or 0)'
	@echo "installing requirements.txt into $(VENV): some minutes and gigabytes, once"
	$(if $(UV),$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) --constraint constraints.txt -r requirements.txt
	touch $@

$(VENV)/.installed-%: requirements/%.txt $(VENV)/.installed
	$(INSTALL) --constraint constraints.txt -r $<
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-trackers
$(VENV)/.installed-slow: $(VENV)/.installed-dev

$(VENV)/.installed-test-post: $(VENV)/.installed-dev $(VENV)/.installed-post
	$(INSTALL) --constraint constraints.txt "transformers[serving]"
	touch $@
