# `make demo` and `make test` work from an empty clone, in an
# environment below .venv/. For the rest, see CONTRIBUTING.md.
#
#   TORCH=torch==2.15.0 make test           another PyTorch, another environment
#   PYTHON=python3.12 make test             another Python, for a new environment
#   TORCHKV_USE_CUDA=1 make build           the CUDA kernels, whatever PyTorch
#   make test PYTEST_ARGS="-k push -x"
#   make test PYTEST_JOBS=0                 the Python tests in one process
#   make bench BENCH_ARGS=--smoke           tiny sizes, only to see whether it runs

TORCH ?= torch==2.13.0
PYTHON ?= python3
PYTEST_ARGS ?=
# Processes: tests wait for other processes and for time, so more than two cores.
PYTEST_JOBS ?= 3
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_OUT ?= build/bench
# Within 10 minutes; the others are optimizers, sparse, lookups, compression, trainer,
# checkpoint, distributed and distributed_sizes.
BENCHMARKS ?= overhead reduce model

# torch==2.13.0 lives in .venv/torch-2.13.0.
ENV := $(shell printf '%s' '$(TORCH)' | sed 's/==/-/; s/[^A-Za-z0-9.+-]/_/g')
VENV := .venv/$(ENV)
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# What the environment's programs start (ninja, cmake) is the environment's too.
USERS_PATH := $(PATH)
export PATH := $(BIN):$(PATH)
# Tests start hundreds of processes. Without files of byte code, each would compile all of
# PyTorch's Python that it imports.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

# A file's tests in one process, so that its fixtures are made once.
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist loadfile

# Stamps: each marks a step as done for this environment. The binaries in
# torchkv/ are for one torch at a time, so `built` exists for one environment.
INSTALLED := $(VENV)/installed
LINT_TOOLS := $(VENV)/lint-tools
DOCS_TOOLS := $(VENV)/docs-tools
BUILT := build/stamps/built-$(ENV)$(TORCHKV_USE_CUDA:%=-cuda-%)

CPP := build/cpp/$(ENV)
TIDY := build/tidy/$(ENV)
HEADERS := $(shell find csrc -name '*.h')
SOURCES := $(shell find csrc -name '*.cpp')
KERNELS := $(shell find csrc -name '*.cu' -o -name '*.cuh')
FORMATTED := $(HEADERS) $(SOURCES) $(KERNELS) \
  $(shell find tests -name '*.h' -o -name '*.cpp') $(wildcard benchmarks/*.cpp)

.PHONY: help env build test test-all test-versions python-test cpp-programs cpp-test places-test forward-test one-rank-test demo demo-dist bench \
  host-time bench-peers sanitize sanitize-address sanitize-thread address-programs \
  thread-programs check-sass gpu-check docs docs-tools sdist wheel wheel-environments wheels lint lint-tools simulate mutants fuzz soak hostile lint-format lint-headers lint-layout lint-python lint-types lint-spelling tidy format \
  clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo        train a small network through the store'
	@echo 'make test        the Python tests, except those marked slow, then the C++ tests'
	@echo 'make test-all    the same with the slow ones'
	@echo 'make test-versions the tests with each supported PyTorch'
	@echo 'make build       install torchkv, editable, into $(VENV)'
	@echo 'make cpp-test    the C++ tests only'
	@echo 'make places-test the Python tests with values sharded over logical devices'
	@echo 'make forward-test the Python tests of behaviour with stores on other threads'
	@echo 'make one-rank-test the same with dist_sync and dist_async of one rank'
	@echo 'make demo-dist   the same with two processes'
	@echo 'make simulate    the parameter server in a simulated network, 100,000 runs'
	@echo 'make mutants     the simulation with planted bugs'
	@echo 'make soak        random operations of four processes for 30 minutes'
	@echo 'make hostile     messages of strangers to a job that trains'
	@echo 'make fuzz        10 million inputs for the decoder of messages'
	@echo 'make bench       all benchmarks: tables, and JSON and plots in $(BENCH_OUT)'
	@echo 'make host-time   the host time of a call, on a fake GPU'
	@echo 'make bench-peers install MXNet, for the benchmarks, into $(MXNET)'
	@echo 'make sanitize    the C++ tests under the address, undefined and thread sanitizers'
	@echo 'make check-sass  the machine code of the CUDA kernels; needs no GPU'
	@echo 'make gpu-check   with a GPU and PyTorch for CUDA: tests, sanitizers, benchmarks'
	@echo 'make docs        the documentation site, in build/docs'
	@echo 'make sdist       a source distribution, in dist/'
	@echo 'make wheel       a wheel for $(TORCH), in dist/, and the tests with it'
	@echo 'make wheels      wheels for $(WHEEL_TORCHES), without and with CUDA kernels'
	@echo 'make lint        formatters, clang-tidy, mypy, codespell, headers, layout; check only'
	@echo 'make format      clang-format and ruff, in place'
	@echo 'make clean       remove build outputs; keep .venv/'

# --- Environment and build ------------------------------------------------------

# need: $(call need,command that succeeds,what is wrong otherwise)
need = @$(1) >/dev/null 2>&1 || { echo "torchkv: $(strip $(2))" >&2; exit 1; }

$(BIN)/python:
	$(call need,command -v $(PYTHON),$(PYTHON) was not found: apt install python3 python3-venv)
	$(call need,$(PYTHON) -c 'import sys; assert sys.version_info >= (3$(comma) 11)',\
	  Python 3.11 or newer is needed; name one: make PYTHON=python3.12)
	$(call need,$(PYTHON) -c 'import ensurepip$(comma) venv',\
	  Python has no venv module: apt install python3-venv)
	$(call need,$(PYTHON) -c 'import os$(comma) sysconfig; \
	  os.stat(sysconfig.get_path("include") + "/Python.h")',\
	  Python.h is missing: apt install python3-dev)
	$(call need,command -v $${CXX:-c++},a C++ compiler is needed: apt install g++)
	$(PYTHON) -m venv --clear $(VENV)

comma := ,

$(INSTALLED): | $(BIN)/python
	$(PIP) install --no-compile '$(TORCH)' 'setuptools>=77' ninja
	@touch $@

env: $(INSTALLED)

$(BUILT): $(INSTALLED) $(SOURCES) $(HEADERS) $(KERNELS) csrc/sources.txt \
  $(wildcard cmake/*) setup.py tools/cuda_kernels.py tools/torch_flags.py pyproject.toml
	$(PIP) install --no-compile --no-build-isolation --editable '.[test,examples]'
	@mkdir -p $(@D) && rm -f $(@D)/built-* && touch $@

build: $(BUILT)

# --- Tests and demo -------------------------------------------------------------

# In this order, also with make -j: each uses all cores.
test:
	$(MAKE) --no-print-directory python-test
	$(MAKE) --no-print-directory cpp-test

# With the slow tests; SLOW_PART=0/3 is the first third of these.
test-all:
	$(MAKE) --no-print-directory test DEFAULT_TESTS=$(SLOW_PART:%=--slow-part=%)

DEFAULT_TESTS := -m 'not slow'

python-test: $(BUILT)
	$(PYTEST) $(DEFAULT_TESTS) $(PYTEST_ARGS)

# Each version has its own environment in .venv/.
TEST_VERSIONS ?= 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
test-versions:
	for version in $(TEST_VERSIONS); do \
	  $(MAKE) --no-print-directory test TORCH="torch==$$version" || exit 1; \
	done

# The tests again, with every store of type device sharding its values in CPU memory.
places-test: $(BUILT)
	TORCHKV_PLACES=cpu,cpu,cpu $(PYTEST) -m 'not slow' \
	  $(patsubst %,--ignore=tests/%,benchmarks dist docs examples tools test_readme.py) $(PYTEST_ARGS)

# The tests of behaviour, with stores of several machines' types of one rank. dist_async
# has the optimizers of dist_sync, but for what needs all gradients of a step.
one-rank-test: $(BUILT)
	TORCHKV_TEST_TYPES=dist_sync $(PYTEST) -m 'not slow' \
	  $(patsubst %,tests/%,kvstore torchscript optim trainer) $(PYTEST_ARGS)
	TORCHKV_TEST_TYPES=dist_async $(PYTEST) -m 'not slow' \
	  $(patsubst %,tests/%,kvstore torchscript) $(PYTEST_ARGS)

demo: $(BUILT)
	$(BIN)/python examples/train_digits.py $(DEMO_ARGS)

# configure: $(call configure,folder,sanitizer)
configure = googletest=$$(tools/get_googletest) && cmake -S . -B $(1) -G Ninja \
  -DTORCHKV_PYTHON=$(BIN)/python -DTORCHKV_GOOGLETEST="$$googletest" \
  -DTORCHKV_SANITIZE=$(2)

# Threads that spin while they wait make the tests several times slower on a machine
# with other load; tests/conftest.py sets the same for Python.
cpp-test sanitize-address: export OMP_WAIT_POLICY := passive
# Where no Python says so: the library in the wheel of pyzmq.
cpp-test sanitize-address: export TORCHKV_LIBZMQ = $(firstword \
  $(wildcard $(VENV)/lib/python3*/site-packages/pyzmq.libs/libzmq-*.so*))

# Locked: CI builds them in the background, too.
cpp-programs: $(BUILT)
	@mkdir -p $(CPP)
	exec 9>$(CPP)/plain.lock && flock 9 && $(call configure,$(CPP)/plain,) && \
	  cmake --build $(CPP)/plain

cpp-test: cpp-programs
	@# At the same time: most of these have one thread.
	GTEST_BRIEF=1 $(CPP)/plain/tests/cpp/torchkv_tests & others=$$!; status=0; \
	  if [ -x $(CPP)/plain/tests/cpp/torchkv_cuda_tests ]; then \
	    GTEST_BRIEF=1 $(CPP)/plain/tests/cpp/torchkv_cuda_tests || status=$$?; \
	  fi; \
	  wait $$others && exit $$status
	$(CPP)/plain/tests/cpp/torchkv_stress
	$(CPP)/plain/tests/cpp/torchkv_simulate --seeds 120
	TORCHKV_REPLAY=$(CPP)/plain/tests/cpp/torchkv_replay \
	  TORCHKV_JOB_RANK=$(CPP)/plain/tests/cpp/torchkv_job_rank \
	  TORCHKV_ALLOCATIONS=$(CPP)/plain/tests/cpp/torchkv_allocations \
	  TORCHKV_SIMULATE=$(CPP)/plain/tests/cpp/torchkv_simulate \
	  $(BIN)/python -m pytest $(DEFAULT_TESTS) tests/dist/test_differential.py \
	  tests/dist/test_cpp_program.py tests/dist/test_simulation.py \
	  tests/dist/test_allocations.py

# --- Several machines -----------------------------------------------------------

# The parameter server's protocol: 17 combinations of modes and faults for each seed.
SIMULATE_ARGS := --seeds 5900
simulate: $(BUILT)
	$(call configure,$(CPP)/plain,)
	cmake --build $(CPP)/plain --target torchkv_simulate
	$(CPP)/plain/tests/cpp/torchkv_simulate $(SIMULATE_ARGS)

# Whether the simulation and the tests find bugs planted in the protocol's cores.
mutants: $(BUILT)
	$(BIN)/python tests/dist/mutants.py --tests $(MUTANTS_ARGS)

FUZZ_INPUTS := 10000000
fuzz: $(BUILT)
	$(call configure,$(CPP)/address,address)
	cmake --build $(CPP)/address --target torchkv_frame_fuzz
	$(CPP)/address/tests/cpp/torchkv_frame_fuzz $(FUZZ_INPUTS)

# Four ranks do random operations, checked against a model, while some are stopped.
soak: $(BUILT)
	$(BIN)/python tests/dist/soak.py $(SOAK_ARGS)

# A job trains while strangers send it recorded, damaged and random messages.
hostile: $(BUILT)
	$(BIN)/python tests/dist/hostile.py --frames 100000 $(HOSTILE_ARGS)

demo-dist: $(BUILT)
	for type in dist_sync dist_async; do \
	  $(BIN)/torchrun --nproc-per-node 2 examples/train_digits_dist.py --type $$type || exit 1; \
	done

# The Python tests of behaviour again, with stores that work on a thread of their own.
forward-test: $(BUILT)
	$(call configure,$(CPP)/plain,)
	cmake --build $(CPP)/plain --target torchkv_forwarding_store
	TORCHKV_TEST_STORE=$(CPP)/plain/tests/cpp/libtorchkv_forwarding_store.so \
	  $(PYTEST) -m 'not slow' \
	  $(patsubst %,tests/%,kvstore torchscript optim state trainer) $(PYTEST_ARGS)

# --- Benchmarks -----------------------------------------------------------------

bench: $(BUILT)
	@mkdir -p $(BENCH_OUT)
	for name in $(BENCHMARKS); do \
	  $(BIN)/python benchmarks/$$name.py --json $(BENCH_OUT)/$$name.json \
	    --plot $(BENCH_OUT)/$$name.png $(BENCH_ARGS) || exit 1; \
	done

# Needs no GPU: the store runs on a fake one.
host-time: $(BUILT)
	$(call configure,$(CPP)/plain,)
	cmake --build $(CPP)/plain --target torchkv_host_time
	$(CPP)/plain/tests/cpp/torchkv_host_time

# MXNet's last release. It needs an old numpy, so its environment is its own.
MXNET := .venv/mxnet-1.9.1

bench-peers: $(MXNET)/installed

# The first Python found for which this numpy has wheels.
$(MXNET)/installed:
	$(call need,test "$$(uname -sm)" = 'Linux x86_64',MXNet has wheels for x86_64 only)
	@for python in $(PYTHON) python3 python3.11 python3.10 python3.9 python3.8; do \
	  if $$python -c 'import sys, ensurepip, venv; \
	    assert (3, 8) <= sys.version_info[:2] <= (3, 11)' 2>/dev/null; then \
	    exec $$python -m venv --clear $(MXNET); \
	  fi; \
	done; \
	echo 'torchkv: MXNet 1.9.1 needs Python 3.8 to 3.11 with its venv module, and none' \
	  'was found; name one: make bench-peers PYTHON=python3.11' >&2; exit 1
	$(MXNET)/bin/python -m pip --disable-pip-version-check install \
	  mxnet==1.9.1 numpy==1.23.5 scikit-learn==1.2.2
	$(MXNET)/bin/python -c 'import mxnet; mxnet.nd.ones(3).asnumpy()'
	@touch $@

# --- Sanitizers -----------------------------------------------------------------

sanitize:
	$(MAKE) --no-print-directory sanitize-address
	$(MAKE) --no-print-directory sanitize-thread

ADDRESS_PROGRAMS ?= torchkv_tests torchkv_cuda_tests torchkv_stress
address-programs: $(BUILT)
	$(call configure,$(CPP)/address,address)
	cmake --build $(CPP)/address --target $(ADDRESS_PROGRAMS)

thread-programs: $(BUILT)
	$(call configure,$(CPP)/thread,thread)
	cmake --build $(CPP)/thread --target torchkv_stress

sanitize-address: export ASAN_OPTIONS := detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1
sanitize-address: export UBSAN_OPTIONS := print_stacktrace=1:halt_on_error=1
sanitize-address: address-programs
	for program in $(ADDRESS_PROGRAMS); do \
	  program=$(CPP)/address/tests/cpp/$$program; \
	  [ ! -x $$program ] || GTEST_BRIEF=1 $$program || exit 1; \
	done

# Old thread sanitizers do not start if the kernel randomizes addresses widely,
# so randomization is disabled where possible.
sanitize-thread: export TSAN_OPTIONS := second_deadlock_stack=1
sanitize-thread: thread-programs
	if setarch -R true 2>/dev/null; then fixed='setarch -R'; fi; \
	  $$fixed $(CPP)/thread/tests/cpp/torchkv_stress

# --- CUDA -----------------------------------------------------------------------

# With the pinned compiler: others allocate registers differently.
check-sass:
	CUDA_HOME=$$(tools/get_nvcc) && export CUDA_HOME && \
	  $(MAKE) --no-print-directory TORCHKV_USE_CUDA=1 build && \
	  $(BIN)/python tools/check_sass.py torchkv/lib/libtorchkv_cuda.so

# Not in .venv: with the PyTorch of PYTHON, which supports the GPU.
RESULTS ?= build/gpu-check
gpu-check: export PATH := $(USERS_PATH)
gpu-check: export PYTHONPATH := $(PYTHONPATH)
gpu-check:
	$(PYTHON) tools/gpu_check.py $(RESULTS)

# --- Packages -------------------------------------------------------------------

# Everything in the repository, in dist/.
sdist: $(INSTALLED)
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'

# In dist/, tested where it is installed. wheel-environments installs what that needs of
# TORCH_OF_WHEEL.
wheel-environments:
	TORCH='$(TORCH_OF_WHEEL)' PYTHON='$(PYTHON)' tools/make_wheel environments
wheel:
	TORCH='$(TORCH)' PYTHON='$(PYTHON)' PYTEST_JOBS='$(PYTEST_JOBS)' tools/make_wheel

# With === they are tested with PyTorch for CUDA, which is what PyPI has.
WHEEL_TORCHES ?= torch===2.13.0 torch===2.15.0
wheels:
	CUDA_HOME=$$(tools/get_nvcc) && export CUDA_HOME && \
	  for torch in $(WHEEL_TORCHES); do for kernels in 0 1; do \
	    TORCHKV_USE_CUDA=$$kernels \
	      $(MAKE) --no-print-directory wheel TORCH="$$torch" || exit 1; \
	  done; done

# --- Documentation --------------------------------------------------------------

$(DOCS_TOOLS): $(BUILT) pyproject.toml
	$(PIP) install --no-build-isolation --editable '.[docs]'
	@touch $@

docs-tools: $(DOCS_TOOLS)

# A warning is an error. From scratch, so that no page of an earlier build stays.
docs: $(DOCS_TOOLS)
	$(call need,command -v doxygen,doxygen is needed: apt install doxygen)
	$(call need,command -v dot,Graphviz is needed: apt install graphviz)
	rm -rf build/docs
	$(BIN)/python -m sphinx -W --keep-going -E -q -j 2 docs build/docs

# --- Lint -----------------------------------------------------------------------

$(LINT_TOOLS): $(BUILT) pyproject.toml
	$(PIP) install --no-build-isolation --editable '.[lint]'
	@touch $@

lint-tools: $(LINT_TOOLS)

# All of them, even if one fails.
lint: $(LINT_TOOLS)
	$(MAKE) --no-print-directory -k -O -j $$(nproc) lint-format lint-headers \
	  lint-layout lint-python lint-types lint-spelling tidy

lint-format:
	clang-format --dry-run -Werror $(FORMATTED)

lint-headers:
	$(BIN)/python tools/check_headers.py

lint-layout:
	$(BIN)/python tools/check_layout.py

lint-python:
	ruff check .
	ruff format --check .

lint-types:
	mypy torchkv

lint-spelling:
	codespell

# TIDY_PART=0/2 is the first half of the sources, to which TIDY_ALSO adds some.
TIDIED := $(if $(TIDY_PART),$(sort $(TIDY_ALSO) $(shell printf '%s\n' $(sort $(SOURCES)) | \
  awk -v part=$(TIDY_PART) 'split(part, p, "/") && NR % p[2] == p[1]')),$(SOURCES))
tidy: $(TIDIED:%.cpp=$(TIDY)/%.ok)

$(TIDY)/%.ok: %.cpp $(HEADERS) .clang-tidy $(TIDY)/compile_commands.json
	clang-tidy -p $(TIDY) --quiet $<
	@mkdir -p $(@D) && touch $@

$(TIDY)/compile_commands.json: $(LINT_TOOLS) CMakeLists.txt tests/cpp/CMakeLists.txt \
  csrc/sources.txt tools/torch_flags.py
	$(call configure,$(TIDY),) >/dev/null
	@touch $@

format: $(LINT_TOOLS)
	clang-format -i $(FORMATTED)
	ruff check --fix .
	ruff format .

clean:
	rm -rf build dist docs/drawn *.egg-info torchkv/include torchkv/lib torchkv/share \
	  torchkv/_C*.so torchkv/_built_for.py
