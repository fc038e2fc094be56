# One line each; continuous integration calls the same.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help demo test quick cpus parsers lint docs planner runs calibration accuracy bench gpu clean

help:            ## this list
	@grep -E '^[a-z]+: .*##' Makefile | sed 's/:.*##/\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/installed: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet --editable . && touch $@

# torch first, in one known version: anything that asks for it later is then content.
$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet $(TORCH) && $(BIN)/pip install --quiet --editable '.[dev,torch]' && touch $@

demo: $(VENV)/installed ## does Llama 3.1 8B fit on 8 H100s? (installs what it needs; no network at run time)
	$(BIN)/loadgauge estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 8192 --micro-batch 1

test: $(VENV)/installed-dev ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

quick: $(VENV)/installed-dev ## the tests that take less than a minute together: without PyTorch, a browser and processes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests

# oneDNN and ATen choose kernels by the CPU's instructions; these make them choose as on lesser CPUs.
cpus: $(VENV)/installed-dev ## the tests that run PyTorch's kernels, as on CPUs with fewer instructions
	ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest -n 2 -m kernels -k "not compiles" tests
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -n 2 -m kernels -k "not compiles" tests

# Without what those tools train with: no release of them agrees with all others on that.
parsers: $(VENV)/installed-dev ## what is exported, read by DeepSpeed, Megatron-Core, axolotl, LLaMA-Factory and verl themselves
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/parsers -r tests/support/parsers.txt
	PYTHONPATH=$(VENV)/parsers $(BIN)/python -m pytest -rs tests/formats/test_formats_parsers.py tests/formats/test_formats_coverage.py

lint: $(VENV)/installed-dev ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: $(VENV)/installed-dev ## the generated pages
	$(BIN)/python docs/generate.py

planner: $(VENV)/installed-dev ## docs/planner.md: what the commands in it print
	$(BIN)/python docs/planner.py

runs: $(VENV)/installed-dev ## the published runs, as rows of the package, from the tables of tools/published_runs
	$(BIN)/python tools/published_runs/convert.py

calibration: $(VENV)/installed-dev ## the GPUs' efficiencies, fitted to the published runs (some minutes)
	PYTHONPATH=tools $(BIN)/python -m accuracy.calibrate

accuracy: $(VENV)/installed-dev ## docs/accuracy.md: predicted against published runs (some minutes)
	$(BIN)/python docs/accuracy.py

bench: $(VENV)/installed-dev ## speed, as a dated table in benchmarks/
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/search_speed.py

gpu: $(VENV)/installed-dev ## calibrate this machine's GPU, and measure 26 trainings on it (an hour); GPU=h100-sxm5-80gb names it
	$(BIN)/python -m loadgauge.compare.gpu_runs $(if $(GPU),--gpu $(GPU)) benchmarks/gpu.json

clean:           ## remove what make made
	rm -rf $(VENV) build dist
