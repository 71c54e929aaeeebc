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
# The tests that `make test` runs.
MARKERS ?= not slow

.DEFAULT_GOAL := help
.PHONY: help environment venv locked uv notebook lock uvlock check-setup gpu-status gpu-hot presets card-report train post-train ddp-train stop kill-gpu test test-slow test-post test-faults check programs format clean

help:
	@awk -F ':.*## ' '/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z -]+:.*## / {sub(/ .*/, "", $$1); printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "CONTRIBUTING.md lists the other targets."

##@ Start
environment venv: $(if $(LOCKED),locked,$(VENV)/.installed) ## install the packages into .venv (once, some minutes)
	@echo "$(VENV) is ready. Next: source $(VENV)/bin/activate"

locked:
	$(if $(UV),,$(error uv is not installed. See https://docs.astral.sh/uv/))
	$(UV) sync --locked --no-config
	touch $(VENV)/.installed

uv: $(VENV)/.installed
	$(INSTALL) uv

notebook: $(VENV)/.installed-notebook ## open notebooks/ in JupyterLab
	$(BIN)/jupyter lab notebooks

lock uvlock:
	$(if $(UV),,$(error uv is not installed. Run make uv))
	env -u UV_INDEX -u UV_DEFAULT_INDEX -u UV_INDEX_URL -u UV_FIND_LINKS $(UV) lock --no-config --default-index https://pypi.org/simple

# The number that accelerate itself would use. Setting it avoids three lines of output.
THREADS = $(if $(CARD),,--num_cpu_threads_per_process $(shell $(BIN)/python -c 'import psutil; print(psutil.cpu_count(logical=False) or 1)'))

# accelerate launch without the traceback that it prints after Ctrl-C.
LAUNCH = $(BIN)/python -c 'import signal; signal.signal(signal.SIGINT, lambda *_: None); \
	from accelerate.commands.accelerate_cli import main; main()' launch --quiet

train: $(VENV)/.installed ## train the quickstart (RECIPE=... FLAGS="...": another run)
	@echo accelerate launch --quiet --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)
	@$(LAUNCH) $(THREADS) --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)

##@ Train
post-train: $(VENV)/.installed-post ## train on addition, then improve with a reward
	$(BIN)/python scripts/addition.py
	$(BIN)/accelerate launch --quiet --config_file $(call quoted,$(ACCELERATE_CONFIG)) train.py --recipe recipes/addition.yaml
	$(BIN)/python post_train.py --config recipes/post/addition.yaml $(FLAGS)

ddp-train: $(VENV)/.installed ## train on all GPUs, or with 2 CPU processes (GPUS=0,1)
ifeq ($(strip $(CARD)),)
	ACCELERATE_USE_CPU=true $(BIN)/torchrun --nproc_per_node $(call quoted,$(NGPUS)) train.py --recipe $(call quoted,$(value RECIPE)) $(FLAGS)
else
	$(BIN)/accelerate launch --quiet --config_file $(DDP_CONFIG) $(call MULTI_GPU,$(DDP_CONFIG)) train.py --recipe $(call quoted,$(DDP_RECIPE)) $(FLAGS)
endif

stop kill-gpu: ## save and stop the runs of this folder (RUN=runs/NAME: one)
	@$(PYTHON) scripts/stop.py $${STOP_RUN:+"$$STOP_RUN"}

##@ GPUs
check-setup: $(VENV)/.installed ## check whether this machine can train
	$(BIN)/python check_setup.py $(FLAGS)

gpu-status: ## show use, memory, power and temperature of each GPU
	@table=$$($(NVIDIA_SMI) --query-gpu=index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu \
		--format=csv,noheader 2>/dev/null) && echo "$$table" | awk -F ', ' \
		'BEGIN {row = "%-4s %-32s %6s %12s %12s %10s %5s\n"; printf row, "GPU", "name", "use", "memory", "of", "power", "°C"} \
		{printf row, $$1, $$2, $$3, $$4, $$5, $$6, $$7}' || echo "no NVIDIA driver was found"

gpu-hot: $(VENV)/.installed
	@$(BIN)/python scripts/gpu_hot.py $(call quoted,$(SECONDS))

card-report: $(VENV)/.installed ## measure your GPU in 5 minutes, to send us the row
	@PYTHON=$(BIN)/python bash benchmarks/first_card.sh report

##@ Develop
presets: $(VENV)/.installed ## write the generated files (CONTRIBUTING.md)
	$(BIN)/python benchmarks/estimate_cards.py --write >/dev/null
	$(BIN)/python scripts/keys_table.py
	$(BIN)/python scripts/resolved_recipes.py
	$(BIN)/python scripts/walkthrough_notebook.py

test: $(VENV)/.installed-dev ## run the tests (about 3 minutes on 2 cores)
	$(BIN)/python -m pytest -m $(call quoted,$(MARKERS)) -n $(WORKERS)

test-slow: $(VENV)/.installed-slow ## run the long tests (about an hour)
	$(BIN)/python -m pytest -m slow

test-post: $(VENV)/.installed-test-post
	$(BIN)/python -m pytest -m post

test-faults: $(VENV)/.installed-dev
	$(BIN)/python tests/fault_injection/run.py $(if $(FULL),--full) $(if $(TREE),--tree $(call quoted,$(TREE))) $(if $(SEED),--seed $(call quoted,$(SEED))) --json benchmarks/results/

check: $(VENV)/.installed-dev ## check format, lint, spelling, types and layout
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	PATH=$(BIN):$$PATH shellcheck .ci/run scripts/*.sh benchmarks/*.sh
	$(BIN)/python -m pytest tests/test_layout.py

format: $(VENV)/.installed-dev ## format the files as `make check` requires
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

programs: $(VENV)/.installed-dev
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
