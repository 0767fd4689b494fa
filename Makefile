# make demo     train on 2 ranks with fastcoll, and with gloo beside it
# make build    compile and install into the environment in use; EXTRA=test or demo also installs what these need
# make test     the tests for every change: 4 to 8 minutes on 2 cores
# make test-all every test; AFTER_TEST=1 leaves out what `make test` has just run. SEED=NUMBER draws new examples, and
#               shuffles the tests
# make lint     the static checks that need no torch, in an environment of their own
# make types    mypy, with the torch in use; make build comes first
# make format   repair what lint can repair
# make docs     the site of docs/, into build/site, by BUILDER: mkdocs, or zensical
# make bench    measure against the stock backends
# make gpu      the kernels and the engine on this machine's GPU: tests, then benchmarks, into OUT; needs no network;
#               PART: one of them only, of at most 10 minutes; "experiment" shows the most
# make sanitize the C++ part under AddressSanitizer, UBSan and ThreadSanitizer
# make fuzz     FUZZ seconds (60) for each parser of what comes from outside
# make model    the shared-memory protocol as a model, checked by spin, and its mutants; MODEL: options
# make clean    remove what was built, not the environment
#
# Faults, soak, mutants, PyTorch's suites, clients, wheels ... are one command each: docs/project/testing.md.
# The environment in use is that of `python3` if it has torch, else .venv, which is made when missing.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
# Two builds in one folder would meet.
.NOTPARALLEL:

# Pinned: the newest torch takes several GB of CUDA packages.
TORCH := torch==2.13.0
HOST_PYTHON ?= python3
# Its path and its torch's version, or nothing without torch.
HERE := $(shell $(HOST_PYTHON) -c 'import importlib.util as u, sys; from importlib import metadata as m; \
    print(*([sys.executable, m.version("torch")] if u.find_spec("torch") else []))' 2>/dev/null)

ifneq ($(HERE),)
PYTHON := $(firstword $(HERE))
ENVIRONMENT :=
else
PYTHON := $(CURDIR)/.venv/bin/python
ENVIRONMENT := .venv/.has-$(TORCH)
endif

# One set of stamps for each environment and its torch, for which a build asks by its metadata. A stamp holds for the
# sources as they were when it was made.
TORCH_HERE := $(or $(lastword $(HERE)),$(TORCH))
STAMPS := build/stamps/$(shell echo "$(PYTHON) $(TORCH_HERE)" | cksum | cut -d' ' -f1)
METADATA := setup.py pyproject.toml fastcoll/_version.py $(wildcard build_backend/*.py)
CSRC := fastcoll/settings.def $(foreach end,cpp hpp inl def,$(wildcard $(addsuffix .$(end),csrc/* csrc/*/* csrc/*/*/*)))
PIP = '$(PYTHON)' -m pip install --disable-pip-version-check
INSTALL = $(PIP) --quiet
# Shows how far a command is, and keeps how long it took.
STEP = '$(PYTHON)' tools/step.py
export MAKE_STARTED := $(shell date +%s)
LINT := build/lint/bin
CPP = find csrc tests/cpp tests/fake_nccl tests/recording_device/csrc -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.inl'
CLANG_FORMAT = $(CPP) | xargs -P "$$(nproc)" -n 16 $(LINT)/clang-format

.PHONY: demo build test test-all lint types format docs bench gpu sanitize fuzz model clean

demo: $(STAMPS)/demo $(STAMPS)/build
	'$(PYTHON)' -m fastcoll demo
	$(STEP) --times

# Ranks wait more than they compute: three workers keep two cores busy. A file stays with one worker, which keeps its
# fixtures. In the order of their names: xdist would begin with the files of most tests, and end with slow ones of few.
# Options for pytest: PYTEST_ADDOPTS.
WORKERS ?= $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
PYTEST = '$(PYTHON)' -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMPS)/test $(STAMPS)/cuda
	$(PYTEST) -m 'not full and not gpu'

test-all: $(STAMPS)/test $(STAMPS)/cuda
	$(PYTEST) -m '$(if $(AFTER_TEST),full and )not gpu' $(if $(SEED),$(DRAWN))
DRAWN = --hypothesis-profile=drawn --hypothesis-seed=$(SEED) --random-order-bucket=module --random-order-seed=$(SEED)

EXTRA ?=
build: $(EXTRA:%=$(STAMPS)/%) $(STAMPS)/$(if $(filter test,$(EXTRA)),cuda,build)

model: $(ENVIRONMENT)
	'$(PYTHON)' tests/model/check_model.py $(MODEL)

FUZZ ?= 60
fuzz:
	bash tests/cpp/fuzz.sh $(FUZZ)

sanitize:
	bash tests/cpp/sanitize.sh

bench: $(STAMPS)/test $(STAMPS)/cuda
	'$(PYTHON)' -m fastcoll.bench

OUT ?= bench/results
gpu: $(ENVIRONMENT)
	PYTHON='$(PYTHON)' OUT='$(OUT)' bash tools/gpu.sh $(PART)

# Needs no torch. A broken link ends it, and so does a page that the navigation lacks.
BUILDER ?= mkdocs
docs: build/docs/.has-requirements
	$(HOST_PYTHON) tools/check_pages.py --links
	rm -rf build/site
	NO_MKDOCS_2_WARNING=1 build/docs/bin/$(BUILDER) build --strict
	build/docs/bin/python tools/built_site.py build/site

build/docs/.has-requirements: mkdocs-requirements.txt
	$(HOST_PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	touch $@

lint: $(LINT)/.has-requirements
	$(LINT)/python -m ruff check .
	$(LINT)/python -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror
	$(LINT)/python -m codespell_lib
	$(LINT)/python tools/check_pages.py
	$(LINT)/python tools/stub.py --check
	$(LINT)/python tools/mutants.py --list > /dev/null

# mypy reads the package as it is installed, with fastcoll.kernels and fastcoll.bench in place, and the packages of the
# environment in use.
types: $(LINT)/.has-requirements $(STAMPS)/test
	bash tools/link_package.sh
	cd build/package
	MYPYPATH=../../tools ../lint/bin/python -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
	    --python-executable '$(PYTHON)' -p fastcoll $(patsubst tools/%.py,-m %,$(wildcard tools/*.py))

format: $(LINT)/.has-requirements
	$(LINT)/python tools/stub.py
	$(LINT)/python -m ruff check --fix .
	$(LINT)/python -m ruff format .
	$(CLANG_FORMAT) -i

$(LINT)/.has-requirements: lint-requirements.txt
	$(HOST_PYTHON) -m venv --clear build/lint
	$(LINT)/python -m pip install --disable-pip-version-check --quiet --no-compile -r $<
	touch $@

clean:
	rm -rf build dist *.egg-info fastcoll/*.so fastcoll/_built_for.json
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -not -path './.clients/*' -prune -exec rm -rf {} +

# --no-compile: Python compiles a module of torch when it is first imported, and most never are.
.venv/.has-$(TORCH):
	$(HOST_PYTHON) -m venv .venv
	$(INSTALL) rich
	$(STEP) torch $(PIP) --no-compile '$(TORCH)'
	touch $@

# The tests need the half that moves device tensors, which is built only if asked for where torch has no CUDA.
# --no-deps: pip never touches the torch that is there.
$(STAMPS)/build $(STAMPS)/cuda: $(METADATA) $(CSRC) $(ENVIRONMENT)
	mkdir -p $(@D)
	$(INSTALL) 'setuptools>=77' wheel ninja rich
	$(if $(filter cuda,$(@F)),USE_CUDA=1) $(STEP) compile $(PIP) --verbose --no-build-isolation --no-deps --editable .
	touch $(STAMPS)/build $@

OR_TRITON := import importlib.util as u; print("" if u.find_spec("triton") else "triton==3.7.1")
# What the extras `demo` and `test` ask for; fastcoll itself is installed by now and stays as it is.
$(STAMPS)/demo: | $(STAMPS)/build
$(STAMPS)/test: | $(STAMPS)/cuda
$(STAMPS)/demo $(STAMPS)/test: pyproject.toml
	$(STEP) packages $(PIP) 'fastcoll[$(@F)]' $(if $(filter demo,$(@F)),,$$('$(PYTHON)' -c '$(OR_TRITON)'))
	touch $@
