# Everything from nothing: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
VENV_TORCH ?= .venv-torch
BIN := $(VENV)/bin
PIP_FLAGS ?= -q
JOBS ?= 2

.PHONY: all setup system demo test lint proof clean

all: setup

# The environment alone; then $(VENV)/bin/tvmc is there.
setup: $(VENV)/.ready

# System packages: installed when root on Debian, named otherwise.
system:
	@cmake/system_packages.sh

$(VENV)/.ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard cmake/*) $(shell find python codegen -name '*.cc' -o -name '*.h' 2>/dev/null) | system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) --upgrade pip
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt scikit-build-core ninja
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[onnx,tune,test]'
	touch $@

# PyTorch has an environment of its own: with it installed, `import tvm` takes several seconds.
$(VENV_TORCH)/.ready: $(VENV)/.ready
	$(PYTHON) -m venv $(VENV_TORCH)
	$(VENV_TORCH)/bin/pip install $(PIP_FLAGS) --upgrade pip
	$(VENV_TORCH)/bin/pip install $(PIP_FLAGS) torch==2.13.0
	$(VENV_TORCH)/bin/pip install $(PIP_FLAGS) -c constraints.txt -e '.[onnx,test,architectures]'
	touch $@

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(VENV_TORCH)/.ready
	$(BIN)/pytest -n $(JOBS) -m "not torch"
	$(VENV_TORCH)/bin/pytest -n $(JOBS) -m torch

demo: $(VENV)/.ready
	$(BIN)/python -m benchmarks.demo

proof: test
	$(BIN)/python -m benchmarks.passes --check
	$(BIN)/python -m benchmarks.host_kernels --check
	$(BIN)/python -m benchmarks.demo --check
	$(BIN)/python -m benchmarks.fusion --check
	$(BIN)/python -m benchmarks.cross_modal --check
	$(BIN)/python -m benchmarks.rotary_pareto --check

clean:
	rm -rf build out $(VENV) $(VENV_TORCH)
