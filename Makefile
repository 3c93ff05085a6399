# `make run` opens the runbooks in JupyterLab; `make test` runs everything. Both make .venv when it is missing.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run demo llama lint check check-tests test test-busy mutants faults soak bench gpu gpu-tests gpu-figures gpu-wheels vllm docs clean packages frameworks clients hub matrix

VENV := .venv
LAB = jupyter lab --ip=127.0.0.1 --port=$(PORT) --ServerApp.root_dir=. $$([ "$$(id -u)" = 0 ] && echo --allow-root) \
	$$([ -n "$${DISPLAY:-}$${WAYLAND_DISPLAY:-}" ] || echo --no-browser)
BIN := $(VENV)/bin
PORT ?= 8888
# An index that carries the CPU build of torch, for package indexes that do not (see "Install" in the README).
TORCH_INDEX ?=

# cuda where an NVIDIA driver answers, else cpu: which build of torch to install.
FLAVOUR := $(shell { nvidia-smi -L || test -e /proc/driver/nvidia/version; } >/dev/null 2>&1 && echo cuda || echo cpu)
CONSTRAINTS_cpu := -c constraints-cpu.txt
# llama-cpp-python comes as source: a few minutes to build, once, then pip keeps the wheel. GGML_NATIVE off, since that
# wheel may be taken to another machine, and pip tells wheels apart by name and not by these options.
LLAMA_cpu := -DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF
LLAMA_cuda := $(LLAMA_cpu) $(if $(shell command -v nvcc),-DGGML_CUDA=on)
LLAMA := $(shell grep -o 'llama-cpp-python\[server\][^"]*' pyproject.toml)
# What the runbooks need, but llama.cpp: JupyterLab opens before that is built.
RUNBOOKS := transformers,notebook,console,redis,serve,fleet,runbooks
JOBS ?= 2
# Compiled modules are kept: without them each worker and each kernel compiles 400 files anew.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.installed-$(FLAVOUR)
RUNBOOKS_STAMP := $(VENV)/.runbooks-$(FLAVOUR)
LLAMA_WHEEL := $(VENV)/wheels/.built-$(FLAVOUR)
# An environment of the other flavour is made anew: pip takes an installed CPU build of torch for good enough.
OTHER_FLAVOUR := $(filter-out %-$(FLAVOUR),$(wildcard $(VENV)/.installed-* $(VENV)/.runbooks-*))
# No test needs these plugins, and without them a process starts a second earlier.
PLAIN := -p no:langsmith_plugin -p no:frontrun -p no:anyio -p no:platformdirs
# What runs on a card: the Python of $(VENV) if it is made. Else python3, where it has torch for CUDA and all other packages
# already: then nothing is installed. Else that of GPU_VENV, without llama.cpp, whose build with nvcc may take more than half
# an hour. `make gpu PYTHON=PATH` names another Python.
GPU_VENV := .venv-gpu
OWN := $(if $(filter gpu gpu-tests gpu-figures,$(MAKECMDGOALS)),$(if $(wildcard $(STAMP)),,$(shell python3 -m tests.gpu.ready --quiet 2>/dev/null)))
PYTHON := $(if $(wildcard $(STAMP)),$(BIN)/python,$(if $(filter ready,$(OWN)),python3,$(GPU_VENV)/bin/python))
ENVIRONMENT := $(if $(filter $(GPU_VENV)/%,$(PYTHON)),$(GPU_VENV)/.ready-$(FLAVOUR))
GPU_OUT := build/gpu
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with notebooks/sanitize.cfg

# $(call install,COMMAND,PACKAGE): installs a Debian package whose command is missing, where that is allowed. Never fails.
# One apt at a time: it has no patience with another.
define install
if ! command -v $(1) >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	flock Makefile sh -c 'apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y $(2)' || true; fi
endef

help:
	@echo "make run     JupyterLab on the runbooks, at 127.0.0.1:$(PORT)"
	@echo "make demo    JupyterLab with two notebooks that share a simulated card"
	@echo "make llama   builds llama.cpp, for GGUF models: some minutes, once"
	@echo "make lint    ruff (rules and format) and mypy"
	@echo "make check   lint, and the tests without real processes, browsers and notebooks: about a minute"
	@echo "make test    lint, and every test, doctest and notebook"
	@echo "make test-busy   make test beside four busy loops: no test depends on how fast the machine is"
	@echo "make mutants   how many of 40 faults in random lines the tests notice (N=40, by folder), and which they do not"
	@echo "make faults  the same for the whole faults of tests/faults (NAME=WORD for some)"
	@echo "make soak    every property test with long counts, the long stories (tests/bench/SOAK.md), 400 mutants, and test-busy"
	@echo "make bench   the figures"
	@echo "make gpu     the tests and the figures of a real card, within 15 minutes (tests/gpu/README.md)"
	@echo "make gpu-figures   its figures; without a card, on a simulated accelerator"
	@echo "make vllm    the tests of real servers, with vLLM for CPUs in an environment of its own (3 GB)"
	@echo "make frameworks   notebooks of 26 frameworks, parked after each cell, in an environment of its own (3 GB)"
	@echo "make clients   39 client libraries against a real server, each in an environment of its own (4 GB)"
	@echo "make hub     JupyterHub with real users of this machine (root), in an environment of its own (2 GB)"
	@echo "make matrix  a small suite with torch 2.4 to the newest, Python 3.10 to 3.14 and others, each in an environment of its own, one after the other (8 GB; NAME=WORD for some)"
	@echo "make docs    the documentation site, in docs/_build/html"
	@echo "make clean   removes .venv and what tests leave behind"

run: $(RUNBOOKS_STAMP)
	@echo "JupyterLab on the runbooks; the URL to open follows. Stop it with Ctrl-C."
	@# With this environment first on the PATH, `gpu` works in JupyterLab's terminals too.
	@export PATH="$(abspath $(BIN)):$$PATH"; exec $(LAB) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

# A card that holds one of the two notebooks, and a ledger of its own, so that the demo moves nobody else's memory.
demo: $(RUNBOOKS_STAMP)
	@echo "Two notebooks that share a simulated card; the URL to open follows. Stop it with Ctrl-C."
	@place=$$(mktemp -d); export PATH="$(abspath $(BIN)):$$PATH" JUPYTERLAB_WORKSPACES_DIR=$$place/workspaces \
		GPU_DEVICES=sim:192MiB,host:2GiB GPU_LEDGER=keeper://$$place/ledger EVICTION_GRACE_SECONDS=0; \
		jupyter lab workspaces import notebooks/demo/workspace.json >/dev/null; exec $(LAB) --LabApp.default_url=/lab/workspaces/demo

# Also the runbooks of GGUF models call it, for the environment of their kernel: VENV is then another one.
llama: $(LLAMA_WHEEL)
	@[ -s $< ] || { echo "llama.cpp is built with a C++ compiler, and none is here. Install g++:  apt install g++"; rm $<; exit 1; }
	@$(BIN)/python -m pip install -q --find-links $(VENV)/wheels $(CONSTRAINTS_$(FLAVOUR)) '$(LLAMA)'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: $(STAMP)
	@$(MAKE) --no-print-directory -j2 -O lint check-tests

check-tests: $(STAMP)
	PYTHONPATH=$(abspath tests/lean) $(BIN)/python -m tests.check

# One run for all. Five workers on two cores: the tests with processes wait for half of their time.
# With loadfile, a run that replaces a crashed worker waits for ever. So a crash ends the run, and names the test.
test:
	@$(MAKE) --no-print-directory -j3 $(STAMP) packages
	@$(MAKE) --no-print-directory lint
	PYTHONPATH=$(abspath tests/lean) $(BIN)/python -m pytest $(PLAIN) -rsfE -n 5 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(NBVAL) tests $(NOTEBOOKS)

test-busy:
	@trap 'kill $$(jobs -p)' EXIT; for loop in 1 2 3 4; do while :; do :; done & done; $(MAKE) --no-print-directory test

soak: $(STAMP) packages $(VENV)/libclang_rt.asan.so .venv-frameworks/.ready .venv-clients/.ready .venv-hub/.ready
	SOAK=1 $(BIN)/python -m pytest -rsfE -m "soak or hypothesis" --hypothesis-profile=soak --timeout=7200 $(NBVAL) tests notebooks/15_many_hosts.ipynb
	@$(MAKE) --no-print-directory mutants N=400
	@$(MAKE) --no-print-directory test-busy

# LLVM's AddressSanitizer, for tests/backends/test_sanitized.py: one file of a Debian package, which is not installed.
$(VENV)/libclang_rt.asan.so: | $(STAMP)
	@cd $(VENV) && apt-get download -q libclang-rt-19-dev && \
	dpkg --fsys-tarfile libclang-rt-19-dev_*.deb | tar -xO --wildcards "*/libclang_rt.asan-$$(uname -m).so" >libclang_rt.asan.so || \
	{ rm -f libclang_rt.asan.so; echo "AddressSanitizer cannot be had here: its tests are skipped"; }
	@rm -f $(VENV)/libclang-rt-19-dev_*.deb

# The map from lines to tests is made first, once a tree: some minutes.
N ?= 40
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants -n $(N)

faults: $(STAMP)
	$(BIN)/python -m tests.mutants faults $(NAME)

bench: $(STAMP)
	$(BIN)/python -m tests.bench

# The figures are measured even if a test fails.
gpu:
	@$(MAKE) --no-print-directory -k gpu-tests gpu-figures

gpu-tests: export PYTHONUNBUFFERED = 1
gpu-tests: $(ENVIRONMENT)
	@mkdir -p $(GPU_OUT)
	$(if $(OWN),@echo "python3 is $(if $(filter ready,$(OWN)),used: it has all packages,not used: $(OWN))")
	$(PYTHON) -m tests.gpu.ready 2>&1 | tee $(GPU_OUT)/machine.txt
	$(PYTHON) -m pytest -m gpu -v -rs --durations=0 --tb=short tests/gpu 2>&1 | tee $(GPU_OUT)/tests.txt

gpu-figures: $(ENVIRONMENT)
	$(PYTHON) -m tests.bench.gpu_figures --out $(GPU_OUT)/figures.md

$(GPU_VENV)/.ready-$(FLAVOUR): pyproject.toml constraints-cpu.txt
	@[ -x $(GPU_VENV)/bin/python ] || $(MAKE) --no-print-directory VENV=$(GPU_VENV) $(GPU_VENV)/bin/python
	@echo "Installing into $(GPU_VENV) what the tests of a card need, with torch for $(FLAVOUR)."
	@$(GPU_VENV)/bin/python -m pip install -q $(CONSTRAINTS_$(FLAVOUR)) -e ".[transformers]" pytest pytest-timeout hypothesis
	@touch $@

# For a card without a package index: what its Python lacks (LACKS), for its version of Python (FOR), as wheels.
FOR := 3.12
LACKS := msgspec
gpu-wheels:
	python3 -m pip download -q --only-binary=:all: --python-version $(FOR) -d $(GPU_OUT)/wheels $(LACKS)
	@echo "There:  python3 -m pip install --no-index --find-links $(GPU_OUT)/wheels --target PLACE $(LACKS); export PYTHONPATH=PLACE"

vllm: $(STAMP) .venv-vllm/.ready
	$(BIN)/python -m pytest -q -rs tests/stories/test_real_servers.py

.venv-vllm/.ready: tests/install/vllm_for_cpus.py
	python3 -m venv .venv-vllm
	.venv-vllm/bin/python $< $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@touch $@

frameworks: $(STAMP) .venv-frameworks/.ready
	$(BIN)/python -m pytest -q -rs -m soak tests/frameworks

# Kernels run in it, so it has gpu-console too. The operators of torchvision and torch.compile need a C++ compiler.
.venv-frameworks/.ready: pyproject.toml constraints-cpu.txt tests/frameworks/requirements.txt tests/frameworks/torchvision_for_cpus.py | $(STAMP)
	@$(call install,c++,g++)
	$(BIN)/python -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install -q -c constraints-cpu.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e ".[transformers]" ipykernel -r tests/frameworks/requirements.txt
	.venv-frameworks/bin/python tests/frameworks/torchvision_for_cpus.py
	@touch $@

# Package indexes have torch for CUDA. It runs without a card; TORCH_INDEX names an index of CPU builds. Nothing is kept: the
# packages of all environments are 50 GB.
matrix: export UV_EXTRA_INDEX_URL = $(TORCH_INDEX)
matrix: export UV_NO_CACHE = 1
matrix: $(STAMP) packages
	$(BIN)/python -m pytest -q -rs -m soak tests/install/test_matrix.py $(if $(NAME),-k '$(NAME)')

clients: $(STAMP) .venv-clients/.ready
	$(BIN)/python -m pytest -q -rs -m soak tests/clients

# One environment for each library, because they need different versions of the same packages. uv shares their files.
.venv-clients/.ready: tests/clients/libraries.txt | $(STAMP)
	@while IFS=: read -r name packages; do \
		mkdir -p .venv-clients/$$name; \
		if [[ $$packages = \ npm\ * ]]; then npm install --silent --prefix .venv-clients/$$name $${packages# npm } </dev/null; \
		else $(BIN)/uv venv -q --clear .venv-clients/$$name && \
		$(BIN)/uv pip install -q --python .venv-clients/$$name $$packages </dev/null; fi || \
		{ echo "$$name cannot be installed: its test is skipped"; rm -rf .venv-clients/$$name; }; \
	done < $<
	@touch $@

hub: $(STAMP) .venv-hub/.ready
	$(BIN)/python -m pytest -q -rs tests/hub

# The servers of other users run in it. So it is made with the system's Python, which they can run, if that is new enough.
.venv-hub/.ready: pyproject.toml constraints-cpu.txt | $(STAMP)
	@$(call install,npm,npm)
	@python=/usr/bin/python3; $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		python=$(BIN)/python; $$python -m venv .venv-hub
	.venv-hub/bin/python -m pip install -q $(CONSTRAINTS_cpu) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e ".[notebook,console,hub]" torch
	npm install --silent -g --prefix .venv-hub configurable-http-proxy </dev/null
	@touch $@

docs: $(STAMP)
	$(BIN)/python docs/_ext/reference.py
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -b html docs docs/_build/html
	@echo "Open  docs/_build/html/index.html"

# Redis for the tests of its ledger, which start one of their own; Chromium for the tests that look at the console and
# JupyterLab as a person does. Where they cannot be had, these tests are skipped and say so.
packages:
	@$(call install,redis-server,redis-server)
	@$(call install,chromium,chromium)

clean:
	rm -rf $(VENV) $(GPU_VENV) .venv-vllm .venv-frameworks .venv-clients .venv-hub .venv-matrix build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache docs/_build
	find . -name __pycache__ -prune -exec rm -rf {} +

# Everything: what the runbooks need, what the tests and the documentation need, and llama.cpp.
$(STAMP): $(RUNBOOKS_STAMP) $(LLAMA_WHEEL)
	@echo "Installing into $(VENV) what tests and documentation need."
	@extras=$$([ -s $(LLAMA_WHEEL) ] && echo all,test,docs || echo $(RUNBOOKS),diffusion,test,docs); \
	$(BIN)/python -m pip install -q --find-links $(VENV)/wheels $(CONSTRAINTS_$(FLAVOUR)) -e ".[$$extras]"
	@touch $@

$(RUNBOOKS_STAMP): pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "Installing into $(VENV) what the runbooks need, with torch for $(FLAVOUR): about a minute where packages are near, 2 GB of disk."
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install -q $(CONSTRAINTS_$(FLAVOUR)) --extra-index-url $(TORCH_INDEX) torch)
	@$(BIN)/python -m pip install -q $(CONSTRAINTS_$(FLAVOUR)) -e ".[$(RUNBOOKS)]"
	@touch $@

# The stamp is empty where there is no compiler. Of the build's lines those with a count are shown: [12/216] ...
$(LLAMA_WHEEL): | $(BIN)/python
	@$(call install,c++,g++)
	@mkdir -p $(@D); if command -v c++ >/dev/null; then \
		echo "Building llama.cpp for GGUF models: some minutes, once. pip keeps what was built."; \
		CMAKE_ARGS='$(LLAMA_$(FLAVOUR))' CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
			$(BIN)/python -m pip wheel -v --no-deps -w $(@D) '$(LLAMA)' >$@.log 2>&1 & build=$$!; \
		tail -n +1 -f --pid=$$build $@.log | grep --line-buffered -o '\[[0-9]*0/[0-9]*\].*' || true; \
		wait $$build || { tail -30 $@.log; exit 1; }; \
		echo built >$@; \
	else echo "No C++ compiler: llama.cpp is left out. For GGUF models: install g++, then  make llama"; : >$@; fi

# The newest Python from 3.11 to 3.13 that can make environments, else any python3 that is new enough.
# On Debian that takes python3-venv, which is installed here where that is allowed.
$(BIN)/python: $(OTHER_FLAVOUR:%=FORCE)
	@$(if $(OTHER_FLAVOUR),echo "The NVIDIA driver has come or gone since $(VENV) was made: making it anew."; rm -rf $(VENV))
	@suitable() { "$$1" -c "import sys$$2; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1; }; \
	find_python() { for python in python3.13 python3.12 python3.11 python3; do \
		if suitable $$python "$$1"; then echo $$python; return; fi; done; }; \
	python=$$(find_python ", venv, ensurepip"); \
	if [ -z "$$python" ]; then \
		bare=$$(find_python ""); \
		if [ -z "$$bare" ]; then \
			echo "gpu-console needs Python 3.11 or newer, and found $$(python3 --version 2>&1 || echo none)."; \
			echo "  Install it:  apt install python3 python3-venv      (Debian 12, Ubuntu 24.04 or newer)"; exit 1; fi; \
		package=$$($$bare -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y "$$package"; fi; \
		python=$$(find_python ", venv, ensurepip"); \
		if [ -z "$$python" ]; then \
			echo "$$bare cannot make virtual environments."; \
			echo "  Install what it lacks:  sudo apt install $$package"; exit 1; fi; \
	fi; \
	echo "Making $(VENV) with $$($$python --version)."; \
	$$python -m venv $(VENV)

FORCE:
