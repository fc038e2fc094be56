# One line each; continuous integration calls the same.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
QUICK  := $(VENV)-quick
TORCH  ?= torch==2.13.0
# What builds pages installs into .venv alone: another environment it takes as it is, with this folder's loadgauge.
PAGES  := $(if $(filter .venv,$(VENV)),.venv/installed-dev)
RUN    := PYTHONPATH="$(CURDIR)/src:$(CURDIR)/tools" $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help demo test thorough search quick cpus versions parsers peers lint docs pictures planner runs operators serving rollout range examples accuracy bench drift stack experts gpu dist sbom clean

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
	$(BIN)/loadgauge estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 4096 --micro-batch 1

test: $(VENV)/installed-dev ## the test suite (8 minutes on two cores), and which tests took longest
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=40 -m "not thorough"

thorough: $(VENV)/installed-dev ## what `make test` leaves out: most cases of long lists, examples of properties, and tests that take long (half an hour)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=40 -m "thorough or property"

search: $(VENV)/installed-dev ## the properties with examples that were never tried; a failure prints the line that repeats it
	$(BIN)/python -m pytest -n 2 --dist worksteal -m property --hypothesis-profile=search tests

# An environment of its own, in seconds: no PyTorch, no browser. Which tests these are is said in tests/conftest.py.
$(QUICK)/installed: pyproject.toml
	$(PYTHON) -m venv $(QUICK)
	$(QUICK)/bin/python -m pip install --quiet --editable . hypothesis pytest pytest-timeout pytest-xdist && touch $@

quick: $(QUICK)/installed ## a sample of the tests, in a minute: a case of each test function that needs no PyTorch and no browser
	$(QUICK)/bin/python -m pytest -n 2 --dist worksteal -m quick tests

# oneDNN and ATen choose kernels by the CPU's instructions; these make them choose as on lesser CPUs.
cpus: $(VENV)/installed-dev ## the tests that run PyTorch's kernels, as on CPUs with fewer instructions
	ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest -n 2 -m kernels -k "not compiles" tests
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -n 2 -m kernels -k "not compiles" tests

# An environment each: old builds of PyTorch are 0.8 GB and more; pip's settings may name an index with the smaller ones for CPUs.
versions:        ## what must hold with the oldest and a middle PyTorch and transformers (5 minutes once they are installed)
	for release in oldest middle; do \
	  test -x $(VENV)-$$release/bin/pytest || { \
	    $(PYTHON) -m venv $(VENV)-$$release && $(VENV)-$$release/bin/python -m pip install --quiet --upgrade pip && \
	    $(VENV)-$$release/bin/pip install --quiet -r tests/versions/$$release.txt && \
	    $(VENV)-$$release/bin/pip install --quiet --editable . hypothesis pytest pytest-timeout; } || exit 1; \
	  timeout 600 $(VENV)-$$release/bin/python -m pytest -q tests/versions || exit 1; \
	done

# Without what those tools train with: no release of them agrees with all others on that.
parsers: $(VENV)/installed-dev ## what is exported, read by DeepSpeed, Megatron-Core, axolotl, LLaMA-Factory and verl themselves
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/parsers -r tests/support/parsers.txt
	PYTHONPATH=$(VENV)/parsers $(BIN)/python -m pytest -rs tests/job_files/test_formats_parsers.py tests/job_files/test_formats_coverage.py tests/job_files/test_formats_proven.py

# Environments of their own: what these tools ask for is not what loadgauge does.
peers:           ## docs/peers.md: what other tools answer, asked anew (some minutes, 2 GB for DeepSpeed's PyTorch)
	$(PYTHON) tools/peers/run.py

lint: $(VENV)/installed-dev ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: $(PAGES) ## the generated pages, and the site in site/
	$(RUN) docs/generate.py && NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

pictures: $(PAGES) ## docs/page-*.png, of the page as it is (Chromium)
	$(RUN) docs/pictures.py

planner: $(PAGES) ## docs/planner.md: what the commands in it print
	$(RUN) docs/planner.py

runs: $(PAGES) ## the published runs, as rows of the package, from the tables of tools/published_runs
	$(RUN) tools/published_runs/convert.py

operators: $(PAGES) ## what kernels achieve, fitted to published measurements of single operations, and docs/operators.md
	$(RUN) -m operators.fit && $(RUN) -m operators.page

serving: $(PAGES) ## what engines of inference reach, fitted to measured servers, and docs/decode.md
	$(RUN) -m engines.fit

rollout: $(PAGES) ## docs/rollout.md: published steps with a rollout beside the prediction
	$(RUN) -m rollout.score

range: $(PAGES) ## the ranges of memory and time, and the factor of software: their spread over published runs (some minutes)
	$(RUN) -m accuracy.memory_range && $(RUN) -m accuracy.slack

examples: $(PAGES) ## docs/dialects.md: how many of the tools' own examples in DIR are answered, and why the others are not
	$(RUN) tools/examples.py $(DIR) --write docs/dialects.md

accuracy: $(PAGES) ## docs/accuracy.md: predicted against published runs (some minutes)
	$(RUN) docs/accuracy.py

# An environment of its own: libraries that ask for CUDA when they are built, or for older versions of others.
.stack/venv/installed: tools/stack/requirements.txt
	$(PYTHON) -m venv .stack/venv && .stack/venv/bin/pip install --quiet --upgrade pip
	.stack/venv/bin/pip install --quiet $(TORCH) setuptools wheel && .stack/venv/bin/pip install --quiet --editable .
	DS_BUILD_OPS=0 .stack/venv/bin/pip install --quiet --no-build-isolation -r tools/stack/requirements.txt && touch $@

stack: .stack/venv/installed ## docs/stack.md: the real libraries on the simulated device, beside the formula (half an hour; resumes)
	HF_HUB_OFFLINE=1 PYTHONPATH=tools .stack/venv/bin/python -W ignore -m stack.page

experts: .stack/experts/installed ## docs/experts.md: layers of experts of three libraries on the simulated device, beside the formula (5 minutes)
	PYTHONPATH="$(CURDIR)/src:$(CURDIR)/tools:$(CURDIR)/.stack/experts" $(PYTHON) -W ignore -m experts.run

# Without what they ask for, which the layers do not need.
.stack/experts/installed:
	pip install --quiet --no-deps --target .stack/experts torchtitan==0.3.0 megatron-core==0.16.1 spmd_types==0.2.3 einops tyro \
		docstring_parser typeguard torchdata datasets tensorboard triton && touch $@

drift: $(PAGES) ## what 2,000 jobs predict otherwise than at BASE (a commit; by default where main was left), by part and cause, and accuracy (10 minutes)
	$(RUN) tools/drift.py $(or $(BASE),$$(git merge-base HEAD main)) --accuracy

bench: $(PAGES) ## speed, as a dated table in benchmarks/
	$(RUN) benchmarks/speed.py
	$(RUN) benchmarks/search_speed.py

gpu: $(VENV)/installed-dev ## calibrate this machine's GPU, and measure 26 trainings on it (an hour); GPU=h100-sxm5-80gb names it
	$(BIN)/python tools/gpu_runs.py $(if $(GPU),--gpu $(GPU)) benchmarks/gpu.json

# The date of the last commit is that of every file inside, so that the same commit gives the same bytes anywhere.
dist: $(VENV)/installed-dev ## wheel and source distribution in dist/, reproducible, checked, and tried in an empty environment
	rm -rf dist && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist . && $(BIN)/twine check --strict dist/*
	rm -rf $(VENV)-wheel && $(PYTHON) -m venv $(VENV)-wheel && $(VENV)-wheel/bin/pip install --quiet dist/*.whl
	cd / && $(abspath $(VENV)-wheel)/bin/loadgauge estimate llama-3.1-8b --gpu h100 --gpus 8 --zero 3 --brief

# A tool of its own environment: what it lists is what a plain `pip install loadgauge` brings, and nothing of the tests.
sbom: dist       ## dist/loadgauge.cdx.json: the components that come with loadgauge, in CycloneDX
	$(PYTHON) -m venv $(VENV)-sbom && $(VENV)-sbom/bin/pip install --quiet 'cyclonedx-bom>=5'
	$(VENV)-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o dist/loadgauge.cdx.json $(VENV)-wheel/bin/python

clean:           ## remove what make made
	rm -rf $(VENV) $(QUICK) $(VENV)-wheel $(VENV)-sbom build dist site
