# Every target installs what it needs, in a bare checkout with Python 3.11, a C compiler and the package registries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# A test whose environment is missing fails instead of being skipped.
FAST := not envoy and not vllm and not cluster and not slow and not processes
# All tests there start processes.
UNCOLLECTED := $(addprefix --ignore=tests/,integration conformance fuzz)
REQUIRED := PREFIX_GATEWAY_REQUIRE_VLLM=1 PREFIX_GATEWAY_REQUIRE_CLUSTER=1
COMPILE := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate

.DEFAULT_GOAL := help
.PHONY: help run fetch-model test check test-fast test-vllm vllm-env test-engine engine-env test-cluster cluster-env images push image-env conformance bench bench-caching bench-engine bench-schedulers bench-serving bench-gpu bench-peers bench-routing bench-live bench-exact bench-sharing bench-tiers bench-dataplane load load-compare fuzz docs lock clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.run $(if $(MODEL),fetch-model) ## Envoy, the picker and four model servers; a workload by round robin and by prefix; runs until Ctrl-C. MODEL=smollm2: real text
	@$(BIN)/python -m bench.demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

fetch-model: engine-env
	@$(BIN)/python -m tests.engine_env run model_server fetch $(or $(MODEL),smollm2)

test: check ## everything CI runs: format, lint, types, layers, and all tests, in parts, with a table of times at the end
	@$(BIN)/python -m tests.suite $(ARGS)

check: $(VENV)/.dev ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test-fast: $(VENV)/.dev ## the tests without processes of their own, on all cores, in less than three minutes
	$(PYTEST) -n auto --dist loadfile -m "$(FAST)" $(UNCOLLECTED) $(ARGS)

test-vllm: vllm-env ## the tests on real vLLM alone
	$(REQUIRED) $(PYTEST) -m vllm $(ARGS)

vllm-env: $(VENV)/.dev ## vLLM on CPU and a tiny model, cached outside the checkout (3 GB, minutes the first time)
	@$(BIN)/python -m tests.vllm_env build

test-engine: engine-env ## the tests of the engine alone, where torch is
	$(BIN)/python -m tests.engine_env run pytest tests/engine $(ARGS)

engine-env: $(VENV)/.dev ## torch and transformers on CPU, cached outside the checkout (1.7 GB, minutes the first time)
	@$(BIN)/python -m tests.engine_env build

test-cluster: cluster-env image-env ## the tests on a real Kubernetes control plane alone
	$(REQUIRED) $(PYTEST) -m cluster $(ARGS)

# The first container engine of this machine. To use another engine, or options: ENGINE="buildah --root /mnt/images".
ENGINE ?= $(firstword $(foreach name,docker podman buildah,$(if $(shell command -v $(name)),$(name))))
IMAGES ?= picker model-server load
VERSION := $(shell awk '/^appVersion:/ {print $$2}' deploy/helm/prefix-gateway/Chart.yaml)
IMAGE_NAME = $(or $(REGISTRY),$(error name the registry for the images: make $@ REGISTRY=registry.example.com/team))
bases := $(if $(BASE),--build-arg BASE=$(BASE)) $(if $(BUILD_BASE),--build-arg BUILD_BASE=$(BUILD_BASE))

images: ## the container images, by docker, podman or buildah: make images push REGISTRY=registry.example.com/team
	@set -e; for image in $(IMAGES); do $(or $(ENGINE),$(error none of docker, podman and buildah is here)) build $(bases) $(BUILD_FLAGS) \
		-f deploy/docker/$$image.Dockerfile -t $(IMAGE_NAME)/$$image:$(VERSION) .; done

push: ## push what `make images` built: make images push REGISTRY=registry.example.com/team
	@set -e; for image in $(IMAGES); do $(ENGINE) push $(PUSH_FLAGS) $(IMAGE_NAME)/$$image:$(VERSION); done

image-env: $(VENV)/.dev ## the images for the tests, by buildah on a base of Debian's packages, cached outside the checkout; as root
	@$(BIN)/python -m tests.image_env build

cluster-env: $(VENV)/.dev ## a Kubernetes control plane, kubectl, helm and Envoy Gateway, cached outside the checkout (minutes the first time)
	@$(BIN)/python -m tests.cluster_env build

conformance: $(VENV)/.dev ## the endpoint picker protocol, row by row; ARGS="--picker IP:PORT ..." for any picker
	$(PYTEST) tests/conformance $(ARGS)

bench: $(VENV)/.dev ## cost of hashing, table, parsing, picking, the whole path of a request, and scraping: tables, a minute or two
	@for b in prefix request pick path scrape; do $(BIN)/python -m bench.bench_$$b; done

bench-caching: $(VENV)/.dev ## hit rates, eviction policies, free queues and block-manager CPU of the model server
	@for b in hit_rate partial free_queue step_cpu; do $(BIN)/python -m bench.model_server.bench_$$b; done

bench-engine: engine-env ## the rows of the pages on caching that need a real model, on one CPU thread; ARGS="--help"
	@$(BIN)/python -m tests.engine_env run bench.model_server.engine $(ARGS)

bench-schedulers: engine-env ## naive, offline and online batches of a real model, with kept prompts and without; ARGS="--help"
	@$(BIN)/python -m tests.engine_env run bench.model_server.engine.schedulers $(ARGS)

bench-serving: engine-env vllm-env ## Poisson arrivals at our engine and at vLLM on the CPU, with the cache and without; ARGS="--help"
	@$(BIN)/python -m tests.engine_env run bench.model_server.serving $(ARGS)

bench-gpu: $(VENV)/.dev $(if $(findstring --tiny,$(ARGS)),engine-env vllm-env) ## the rows that need a GPU, within ten minutes; a second run continues the first; PYTHON=... with torch for CUDA; ARGS="--tiny": on the CPU
	@$(if $(findstring --tiny,$(ARGS)),$(BIN)/python,$(PYTHON)) -m bench.gpu $(ARGS)

bench-peers: engine-env vllm-env ## our engine against transformers' continuous batching and vLLM on the CPU, a few minutes; ARGS="--help"
	@$(BIN)/python -m tests.engine_env run bench.model_server.peers $(ARGS)

bench-routing: $(VENV)/.dev ## the picker against 27 other rules in a simulated fleet; ARGS="--help"
	@$(BIN)/python -m bench.routing $(or $(ARGS),--quick)

bench-live: $(VENV)/.dev ## a small run on real processes and in the simulator, with the same requests: some minutes; ARGS="--help"
	@$(BIN)/python -m bench.routing.live $(or $(ARGS),--quick)

bench-exact: $(VENV)/.dev ## what exact mode costs, and what it gains in the simulated fleet; ARGS="--workloads hot --seeds 1"
	@$(BIN)/python -m bench.bench_exact
	@$(BIN)/python -m bench.routing.exact_mode $(ARGS)

bench-sharing: $(VENV)/.dev ## bytes and CPU for each request that pickers share, over nothing and over a real Redis
	@$(BIN)/python -m bench.bench_sharing

bench-tiers: engine-env ## prefixes on disk, OPT's shapes: time to first token, bytes, reads; build/bench-tiers.json, .svg; ARGS="--help"
	@mkdir -p build
	@$(BIN)/python -m tests.engine_env run bench.tiers --json build/bench-tiers.json --svg build/bench-tiers.svg $(ARGS)

bench-dataplane: $(VENV)/.dev ## CPU per request of the picker and of Envoy, and added latency, against the floor
	@$(BIN)/python -m bench.dataplane $(ARGS)

load: $(VENV)/.dev ## locust users against the gateway of `make run`; ARGS="shared --users 50", ARGS="--host http://..."
	@$(BIN)/python -m bench.load $(ARGS)

load-compare: $(VENV)/.dev ## the same locust run by round robin and by the default rule, one report; ARGS="replay"
	@$(BIN)/python -m bench.load compare $(ARGS)

soak: $(VENV)/.dev ## the whole gateway under a mixed load, while pickers are killed and Redis is flushed: nothing may grow or fail; ARGS="--minutes 30"
	@$(BIN)/python -m bench.soak $(ARGS)

fuzz: $(VENV)/.dev ## generated input at every entry of the picker; ARGS="--entry policy_file --megabytes 100 --seed 7"
	@$(BIN)/python -m tests.fuzz $(ARGS)

docs: $(VENV)/.dev ## write the reference pages and the chart's generated files anew from the code
	@$(BIN)/python -c 'from epp.reference import PAGES, PLACES; [open(PLACES[p], "w").write(PAGES[p]()) for p in PAGES]'
	@$(BIN)/python -m tests.charts.policy_schema

lock: $(VENV)/.dev ## write the requirement files anew from pyproject.toml
	$(COMPILE) pyproject.toml --extra run --group build -o requirements/run.txt
	$(COMPILE) pyproject.toml --extra run --extra exact --extra kv-events --extra kubernetes --extra redis --extra tracing --group dev -o requirements/dev.txt
	$(COMPILE) --group load -c requirements/dev.txt -o requirements/load.txt
	$(COMPILE) pyproject.toml --extra exact --extra kubernetes --extra redis --extra tracing --group build -c requirements/dev.txt -o requirements/picker.txt
	$(COMPILE) --group compile -c requirements/dev.txt -o requirements/compile.txt
	$(COMPILE) pyproject.toml --extra kv-events --group build -c requirements/dev.txt -o requirements/model-server.txt
	$(BIN)/python -m tests.vllm_env lock
	$(BIN)/python -m tests.engine_env lock

clean: ## remove the virtual environment and caches of this checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build epp/request/*.so epp/extproc/*.so

$(VENV)/.run: requirements/run.txt pyproject.toml epp/request/_jsontext.c epp/extproc/_wire.c epp/prefix_index/_chain.c
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages (the first time: half a minute)"
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/run.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.run
	@echo "installing the packages of the checks, tests and load runs (the first time: a minute)"
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	@touch $@
