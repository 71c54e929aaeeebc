# Requires make, and Python 3.11 or newer. `make` without a target lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# GPUS=0,1 restricts a target to these GPUs, with the numbers of nvidia-smi.
GPUS ?=
# Quote a value as one word of the shell.
quoted = '$(subst ','\'',$(1))'
NVIDIA_SMI = nvidia-smi $(if $(GPUS),--id=$(call quoted,$(GPUS)))
ifneq ($(GPUS),)
export CUDA_DEVICE_ORDER := PCI_BUS_ID
export CUDA_VISIBLE_DEVICES := $(GPUS)
endif
# Without a driver, nvidia-smi prints an error to its standard output, so its exit status is checked.
CARD := $(shell names=$$($(NVIDIA_SMI) --query-gpu=name --format=csv,noheader 2>/dev/null) && echo "$$names" | head -n 1)
# The accelerate configuration for a number of these GPUs, or for the CPU if there are none.
preset = accelerate_configs/$(shell $(PYTHON) -c 'import sys; from ursa_minor.base import gpus; \
	print(gpus.preset(sys.argv[1], int(sys.argv[2])))' $(call quoted,$(CARD)) $(call quoted,$(1))).yaml
ACCELERATE_CONFIG ?= $(call preset,1)
# Processes of `make ddp-train`: one per GPU of this machine, or two if it has no GPU.
NGPUS ?= $(if $(CARD),$(shell $(NVIDIA_SMI) --query-gpu=name --format=csv,noheader | grep -c .),2)
DDP_CONFIG = $(call preset,$(NGPUS))
# Flags for several GPUs, if there is only a configuration for one of them.
MULTI_GPU = $(if $(findstring _x$(NGPUS).yaml,$(1)),,$(if $(filter 1,$(NGPUS)),,--multi_gpu --num_processes $(call quoted,$(NGPUS))))
RECIPE ?= recipes/quickstart.yaml
# On GPUs, the default recipe of `make ddp-train` is a larger model.
DDP_RECIPE = $(if $(CARD),$(if $(filter file,$(origin RECIPE)),recipes/gpt2_124m_openwebtext.yaml,$(value RECIPE)),$(value RECIPE))
SECONDS ?= 60
# Flags as the shell reads them: FLAGS='--run_name "a b"'.
FLAGS ?=
# The run folder for `make stop`. It is exported unexpanded, because make would expand a $ in its name.
unexport RUN
export STOP_RUN := $(value RUN)
# uv is used if it is installed.
UV := $(shell command -v uv || ls $(BIN)/uv 2>/dev/null)
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check)
# Parallel tests: one per core. Each needs a gigabyte of memory.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 16))')

.DEFAULT_GOAL := help
.PHONY: help environment venv locked uv notebook lock uvlock check-setup gpu-status gpu-hot presets card-report train post-train ddp-train stop kill-gpu test test-slow test-post test-faults check programs format clean

help: ## list the targets
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{sub(/ .*/, "", $$1); printf "make %-14s %s\n", $$1, $$2}'

environment venv: $(if $(LOCKED),locked,$(VENV)/.installed) ## create .venv and install requirements.txt (LOCKED=1: use uv to install the versions and hashes of uv.lock)
	@echo "$(VENV) is ready. Next: source $(VENV)/bin/activate"

locked:
	$(if $(UV),,$(error uv is not installed. See https://docs.astral.sh/uv/))
	$(UV) sync --locked --no-config
	touch $(VENV)/.installed

uv: $(VENV)/.installed ## install uv into .venv; the other targets then use it
	$(INSTALL) uv

notebook: $(VENV)/.installed-notebook ## open notebooks/ in JupyterLab
	$(BIN)/jupyter lab notebooks

lock uvlock: ## update uv.lock, with hashes, from the public index only
	$(if $(UV),,$(error uv is not installed. Run make uv))
	env -u UV_INDEX -u UV_DEFAULT_INDEX -u UV_INDEX_URL -u UV_FIND_LINKS $(UV) lock --no-config --default-index https://pypi.org/simple

# The number that accelerate itself would use. Setting it avoids three lines of output.
THREADS = $(if $(CARD),,--num_cpu_threads_per_process $(shell $(BIN)/python -c 'import psutil; print(psutil.cpu_count(logical=False) or 1)'))

# accelerate launch without the traceback that it prints after Ctrl-C.
LAUNCH = $(BIN)/python -c 'import signal; signal.signal(signal.SIGINT, lambda *_: None); \
	from accelerate.commands.accelerate_cli import main; main()' launch --quiet

train: $(VENV)/.installed ## train the quickstart, or another recipe (RECIPE=recipes/own_text.yaml FLAGS="--data_files my.txt")
	@echo accelerate launch --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)
	@$(LAUNCH) $(THREADS) --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)

post-train: $(VENV)/.installed-post ## pre-train a small GPT-2 on addition, then improve it with a reward (FLAGS: flags of post_train.py)
	$(BIN)/python scripts/addition.py
	$(BIN)/accelerate launch --quiet --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe recipes/addition.yaml
	$(BIN)/python post_train.py --config recipes/post/addition.yaml $(FLAGS)

ddp-train: $(VENV)/.installed ## train gpt2_124m_openwebtext on all GPUs (GPUS=0,1: on these two), or the quickstart with 2 CPU processes if there is no GPU
ifeq ($(strip $(CARD)),)
	ACCELERATE_USE_CPU=true $(BIN)/torchrun --nproc_per_node $(call quoted,$(NGPUS)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)
else
	$(BIN)/accelerate launch --quiet --config_file $(DDP_CONFIG) $(call MULTI_GPU,$(DDP_CONFIG)) train.py --recipe $(call quoted,$(DDP_RECIPE)) $(FLAGS)
endif

stop kill-gpu: ## stop the runs of this folder after they have saved a checkpoint (RUN=runs/name: only this run); other programs on the GPUs continue
	@$(PYTHON) scripts/stop.py $${STOP_RUN:+"$$STOP_RUN"}

check-setup: $(VENV)/.installed ## check whether this machine can train (FLAGS="--estimate --all_cards": estimate a run on each GPU model)
	$(BIN)/python check_setup.py $(FLAGS)

gpu-status: ## show utilization, memory, power and temperature of each GPU
	@table=$$($(NVIDIA_SMI) --query-gpu=index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu \
		--format=csv,noheader 2>/dev/null) && echo "$$table" | awk -F ', ' \
		'BEGIN {row = "%-4s %-32s %6s %12s %12s %10s %5s\n"; printf row, "GPU", "name", "use", "memory", "of", "power", "°C"} \
		{printf row, $$1, $$2, $$3, $$4, $$5, $$6, $$7}' || echo "no NVIDIA driver was found"

gpu-hot: $(VENV)/.installed ## compute matrix products on every GPU, to warm it up or to test it (SECONDS=60; 0: until Ctrl-C; GPUS=0,1)
	@$(BIN)/python scripts/gpu_hot.py $(call quoted,$(SECONDS))

presets: $(VENV)/.installed ## regenerate accelerate_configs/, the tables of GPUs and of keys (docs/configuration.md), notebooks/walkthrough.ipynb and the golden file of recipes
	$(BIN)/python benchmarks/estimate_cards.py --write >/dev/null
	$(BIN)/python scripts/keys_table.py
	$(BIN)/python scripts/resolved_recipes.py
	$(BIN)/python scripts/walkthrough_notebook.py

card-report: $(VENV)/.installed ## measure tokens/s, MFU and peak memory of GPT-2 124M on your GPU (5 minutes), and print the row to send us
	@PYTHON=$(BIN)/python bash benchmarks/first_card.sh report

test: $(VENV)/.installed-dev ## run the tests (about 3 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS)

test-slow: $(VENV)/.installed-slow ## run the long tests: kills at random steps, comparisons with other programs
	$(BIN)/python -m pytest -m slow

test-post: $(VENV)/.installed-test-post ## run the tests that need TRL: rewards, chat, TRL's command line with our files (3 minutes)
	$(BIN)/python -m pytest -m post

test-faults: $(VENV)/.installed-dev ## run the fault-injection tests: corrupted files, kills, full disks, fuzzing, faulty servers (FULL=1: all of them; SEED=7; TREE=another checkout)
	$(BIN)/python tests/fault_injection/run.py $(if $(FULL),--full) $(if $(TREE),--tree $(call quoted,$(TREE))) $(if $(SEED),--seed $(call quoted,$(SEED))) --json benchmarks/results/

check: $(VENV)/.installed-dev ## check format, lint, spelling, types, shell scripts and layout rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	PATH=$(BIN):$$PATH shellcheck .ci/run scripts/*.sh benchmarks/*.sh
	$(BIN)/python -m pytest tests/test_layout.py

format: $(VENV)/.installed-dev ## format the files as `make check` requires
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

programs: $(VENV)/.installed-dev ## load our models in llama.cpp, mlx-lm and other programs, and write the table of docs/export.md (an hour; PROGRAMS="mlx-lm": only this one)
	$(BIN)/python -m benchmarks.programs $(if $(PROGRAMS),--only $(PROGRAMS))

clean: ## delete .venv, but not data/ and runs/
	rm -rf $(VENV)

# Install torch first, so that the version range of another package does not select its build.
$(VENV)/.installed: requirements.txt constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required. Use make PYTHON=python3.12 ..." or 0)'
	@echo "Installing requirements.txt into $(VENV). This takes a few minutes and gigabytes, once"
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
