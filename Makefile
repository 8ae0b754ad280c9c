# Every target installs what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HIVEMIND := .venv-hivemind
FEED := .venv-feed
SYNCHRONIZER := .venv-synchronizer
VLLM := .venv-vllm
# The default torch of the index installs gigabytes of CUDA, which the tests and the demo do not use.
TORCH ?= torch==2.13.0

# Two workers more than cores, because tests with processes are idle much of the time.
WORKERS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) + 2 )))

.PHONY: test-prometheus help demo posttrain test test-long test-examples test-etcd test-network test-deploy test-dashboard test-slurm test-integrations test-posttrain test-optimizers test-gpu test-vllm test-feed test-synchronizer check lint docs reference dist installable bench bench-hivemind bench-convergence proto soak endurance clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo: $(VENV)/installed ## train in four processes that average, and kill one of them
	$(BIN)/python -m examples.demo

posttrain: $(VENV)/integrations ## a random language model learns from an environment of verifiers, and its parts are killed; about 3 minutes
	$(BIN)/python -m examples.posttrain

# Each process would otherwise rewrite the assertions of 300 files again: 9 s of a processor.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/installed ## all tests except those of the targets test-… below
	$(BIN)/python -m pytest -m "not long and not interop and not etcd and not network and not deploy and not browser and not prometheus and not slurm and not gpu" --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-long: $(VENV)/installed ## the long tests, and the fuzz tests with eight times as many examples; about 30 minutes
	LONG_TESTS=1 $(BIN)/python -m pytest -m long --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)
	LONG_TESTS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) tests/fuzz tests/tensors/test_compression.py

test-examples: $(VENV)/installed ## the demo, the examples and the quickstarts of the pages from end to end, about 3 minutes
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal \
		tests/examples/test_demo_processes.py::test_the_demo_keeps_its_promises tests/examples/test_examples.py \
		tests/feed/test_feed_page.py tests/workers/test_workers_page.py $(PYTEST_ARGS)

test-etcd: $(VENV)/installed ## the tests with a real etcd server (apt-get install etcd-server), about 2 minutes
	$(BIN)/python -m pytest -m etcd tests/etcd $(PYTEST_ARGS)

test-slurm: $(VENV)/installed ## the batch scripts on a real Slurm, as root (apt-get install slurmctld slurmd munge), about 3 minutes
	$(BIN)/python -m pytest -m slurm tests/slurm $(PYTEST_ARGS)

# Most of the time is spent waiting for what does not arrive.
test-network: $(VENV)/installed ## the tests of bad paths in network namespaces, as root (apt-get install iproute2 nftables), about 5 minutes
	$(BIN)/python -m pytest -m network --numprocesses 4 --dist worksteal tests/network $(PYTEST_ARGS)

test-deploy: $(VENV)/deploy ## the tests of deploy/ (apt-get install kubernetes-client systemd), about 1 minute
	$(BIN)/python -m pytest -m deploy --numprocesses 2 --dist worksteal tests/deploy $(PYTEST_ARGS)

test-dashboard: $(VENV)/browser ## the tests of the page in a real browser (apt-get install chromium), about 1 minute
	$(BIN)/python -m pytest -m browser tests/dashboard $(PYTEST_ARGS)

test-prometheus: $(VENV)/installed ## deploy/'s configuration, alerts and dashboard with the real Prometheus (apt-get install prometheus), about 2 minutes
	$(BIN)/python -m pytest -m prometheus tests/metrics/test_prometheus.py $(PYTEST_ARGS)

# In one process, because every worker would import all the trainers.
test-integrations: $(VENV)/integrations ## the tests in trainers, loggers and environments, which are installed first (400 MB); about 3 minutes
	$(BIN)/python -m pytest -m integrations tests/trainers tests/rollouts $(PYTEST_ARGS)

test-posttrain: $(VENV)/integrations ## post-training from end to end; about 5 minutes
	$(BIN)/python -m pytest -m posttrain tests/trainers/test_posttrain.py $(PYTEST_ARGS)

# In two processes, because the models are small.
test-optimizers: $(VENV)/optimizers ## newcomers of every optimizer of torch, schedulefree, prodigyopt, bitsandbytes and transformers; about 3 minutes
	$(BIN)/python -m pytest -m optimizers --numprocesses 2 --dist worksteal tests/optimizers $(PYTEST_ARGS)

# With the Python that has torch for CUDA, which stays as it is: only what is missing besides is installed, and none of
# its other plugins of pytest is loaded.
test-gpu: ## everything with models on a GPU, on a machine that has one; PYTHON has torch for CUDA; about 3 minutes
	$(PYTHON) -c 'import torch, sys; torch.cuda.is_available() or sys.exit("make test-gpu needs a GPU, and a torch with CUDA: PYTHON=…")'
	$(PYTHON) -c 'import averaging, grpc_tools, hypothesis, pytest_asyncio, pytest_timeout, xdist' 2>/dev/null || $(PYTHON) -m pip install --quiet --group gpu --editable .
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PYTHON) -m pytest -p xdist.plugin -p pytest_asyncio.plugin -p pytest_timeout -p _hypothesis_pytestplugin -m gpu --numprocesses 4 \
		--dist worksteal tests/gpu $(PYTEST_ARGS)

test-vllm: $(VLLM)/installed ## the backend of vLLM's weight transfer with the real vLLM, without a GPU; installs 1 GB, then about 1 minute
	$(VLLM)/bin/python -m pytest -m vllm -W ignore tests/vllm $(PYTEST_ARGS)

test-feed: $(VENV)/installed $(FEED)/installed ## test the feed with the server, environments and trainer of atroposlib
	FEED_PYTHON=$(CURDIR)/$(FEED)/bin/python $(BIN)/python -m pytest -m interop --numprocesses 2 tests/interop \
		--ignore tests/interop/test_original_synchronizer.py $(PYTEST_ARGS)

test-synchronizer: $(VENV)/installed $(SYNCHRONIZER)/installed ## test the synchronizer with that of trinity-rft, about 2 minutes
	SYNCHRONIZER_PYTHON=$(CURDIR)/$(SYNCHRONIZER)/bin/python $(BIN)/python -m pytest -m interop --numprocesses 2 \
		tests/interop/test_original_synchronizer.py $(PYTEST_ARGS)

lint: $(VENV)/installed ## check style, types, import directions and the budget of lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.budget

docs: $(VENV)/docs ## build the documentation site in build/site; a broken link is an error
	$(BIN)/python -m tools.site

reference: $(VENV)/installed ## write options.md, cli.md and metrics.md in docs/reference after a change of an option or a metric
	$(BIN)/python -m tools.reference

dist: $(VENV)/installed ## build and check a wheel and an sdist in dist/
	rm -rf dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

# The newest Python of the classifiers, on which not all machines can run the tests.
installable: $(VENV)/installed ## check that everything the package requires has a wheel for Python 3.14
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --python-version 3.14 --only-binary=:all: \
		--target build/python3.14 .

check: lint docs dist installable test test-examples test-integrations ## run everything that CI runs

bench: $(VENV)/installed ## benchmarks: averaging and Gloo, codecs, groups of more and more peers
	$(BIN)/python -m benchmarks.allreduce --peers 2 4 --mib 64 --tensors 4 --codecs none --output runs/benchmarks
	$(BIN)/python -m benchmarks.codecs --output runs/benchmarks
	$(BIN)/python -m benchmarks.scale --real 2 4 8 --simulate --one-key --output runs/benchmarks

bench-hivemind: $(VENV)/installed $(HIVEMIND)/installed ## benchmark averaging and hivemind, which gets an environment of its own
	$(BIN)/python -m benchmarks.allreduce --peers 2 4 --mib 64 --tensors 4 --codecs none fp16 \
		--hivemind $(HIVEMIND)/bin/python --output runs/benchmarks

bench-convergence: $(VENV)/installed ## train a part of the convergence benchmark in 10 minutes; again for the next part
	$(BIN)/python -m benchmarks.convergence --rows page --minutes 10 --processes 2 --output runs/benchmarks/convergence

bench-feed: $(VENV)/installed $(FEED)/installed ## benchmark the feed server and that of atroposlib
	$(BIN)/python -m benchmarks.feed --atropos $(FEED)/bin/python --output runs/benchmarks

proto: $(VENV)/installed ## compile protos/ after a change
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python hatch_build.py

$(VENV)/installed: pyproject.toml hatch_build.py $(wildcard protos/averaging/wire/*.proto)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dev --editable .
	touch $@

$(VENV)/integrations: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group dev --editable '.[integrations]'
	touch $@

$(VENV)/optimizers: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group optimizers
	touch $@

$(VENV)/deploy: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group deploy
	touch $@

$(VENV)/browser: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group browser
	touch $@

$(VENV)/docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

$(HIVEMIND)/installed: pyproject.toml
	test -x $(HIVEMIND)/bin/python || $(PYTHON) -m venv $(HIVEMIND)
	$(HIVEMIND)/bin/python -c 'import torch' 2>/dev/null || $(HIVEMIND)/bin/python -m pip install --quiet $(TORCH)
	$(HIVEMIND)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(HIVEMIND)/bin/python -m pip install --quiet --group hivemind --editable .
	touch $@

# Without what vLLM requires for GPUs: the tests need its Python code only.
$(VLLM)/installed: pyproject.toml hatch_build.py tests/vllm/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -c 'import torch' 2>/dev/null || $(VLLM)/bin/python -m pip install --quiet $(TORCH)
	$(VLLM)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VLLM)/bin/python -m pip install --quiet --group dev --editable .
	$(VLLM)/bin/python -m pip install --quiet --no-deps vllm==0.33.0 compressed-tensors==0.17.0 apache-tvm-ffi xgrammar llguidance
	$(VLLM)/bin/python -m pip install --quiet --requirement tests/vllm/requirements.txt
	touch $@

$(FEED)/installed: tests/interop/requirements.txt
	test -x $(FEED)/bin/python || $(PYTHON) -m venv $(FEED)
	$(FEED)/bin/python -c 'import torch' 2>/dev/null || $(FEED)/bin/python -m pip install --quiet $(TORCH)
	$(FEED)/bin/python -m pip install --quiet --no-deps atroposlib==0.4.0
	$(FEED)/bin/python -m pip install --quiet --requirement tests/interop/requirements.txt
	touch $@

$(SYNCHRONIZER)/installed:
	test -x $(SYNCHRONIZER)/bin/python || $(PYTHON) -m venv $(SYNCHRONIZER)
	$(SYNCHRONIZER)/bin/python -c 'import torch' 2>/dev/null || $(SYNCHRONIZER)/bin/python -m pip install --quiet $(TORCH)
	$(SYNCHRONIZER)/bin/python -m pip install --quiet ray omegaconf
	$(SYNCHRONIZER)/bin/python -m pip install --quiet --no-deps trinity-rft==0.6.0
	touch $@

soak: $(VENV)/installed ## run two runs of peers under faults: MINUTES=2 SEED=1
	$(BIN)/python -m tests.endurance --only gradients local --minutes $(or $(MINUTES),2) --seed $(or $(SEED),1)

endurance: $(VENV)/installed ## run everything at once under faults: HOURS=2 (or MINUTES=10) SEED=1
	$(BIN)/python -m tests.endurance $(if $(MINUTES),--minutes $(MINUTES),--hours $(or $(HOURS),2)) --seed $(or $(SEED),1)

clean: ## remove all environments and build outputs
	rm -rf $(VENV) $(HIVEMIND) $(FEED) $(SYNCHRONIZER) $(VLLM) build dist runs averaging/wire/*_pb2*
