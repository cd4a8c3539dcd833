PYTHON ?= python3
export PYTHON
VENV ?= .venv
BIN := $(VENV)/bin
# Three stages of one environment: each file says that the packages of its stage are there, and of those before it.
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test
READY := $(VENV)/.ready

DIGITS := --policies fp32,bf16,fp16 --seeds 2 --metric 'acc +([0-9.]+)'
FRAMEWORKS := keras paddle
# torch's CUDA build is some GB with its libraries: tests of it are not part of CI. They need no GPU.
# A shim of a version manager is found without being runnable: ask it.
CUDA_PYTHON ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
CUDA_BUILD := .venv-cuda

# Keep byte code: a framework that is compiled at every start takes longer to start than to train.
unexport PYTHONDONTWRITEBYTECODE

MUTANTS ?= --count 120

.PHONY: demo environment mutants environments test test-slow test-all crash-test test-cuda-build test-wheel test-frameworks demo-frameworks frameworks-table check static dist resolve bench docs examples readme clean

# Everything below installs what it needs into .venv, and for other frameworks into .venv-keras and .venv-paddle, and nothing anywhere else. An
# environment is updated when one of these files is newer. Nothing is removed: one that make did not create is refused. docs/install.md has the times.
FROM := pyproject.toml constraints.txt
INSTALL := .ci/environment
PINNED := --constraint constraints.txt --editable
# Left to the first import, byte code is written on one core, and each file's warnings would fail a test. Some packages have templates that end in .py.
COMPILE = $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true

$(DEMO): $(FROM)
	@$(INSTALL) $(VENV) 'the demo: Mezzo and scikit-learn, 38 packages, 1.1 GB (torch built for CUDA: 5 GB more), about 1 minute on 2 cores' $(PINNED) '.[examples]'
	@$(BIN)/python -c 'import torch._inductor.compile_fx, scipy.stats, sklearn.datasets, matplotlib.figure'  # their byte code, before anything is timed
	@touch $@

$(TEST): $(FROM)
	@$(INSTALL) $(VENV) 'the tests: Mezzo, pytest, mypy, ruff, Triton, 66 packages, 2.2 GB, about 2 minutes on 2 cores' $(PINNED) '.[test,check,triton,fp8]'
	@$(COMPILE)
	@touch $(DEMO) $@

$(READY): $(FROM)
	@$(INSTALL) $(VENV) 'all tests, benchmarks and documentation: also Lightning, Transformers, trackers, Sphinx, 175 packages, 3.0 GB, about 4 minutes on 2 cores' $(PINNED) '.[dev]'
	@$(COMPILE)
	@touch $(DEMO) $(TEST) $@

# Only a tenth of a framework is ever imported: the last command writes the byte code of that before anything is timed.
$(VENV)-%/.ready: pyproject.toml requirements-%.txt
	@$(INSTALL) $(VENV)-$* 'the examples and tests of $*: about 2 GB and 3 minutes on 2 cores' --requirement requirements-$*.txt --editable '.[test]'
	$(VENV)-$*/bin/python -c 'import $*, sklearn.datasets'
	@touch $@

# Only the table of docs/frameworks.md needs it.
$(VENV)-trainers/.ready: pyproject.toml requirements-trainers.txt
	@$(INSTALL) $(VENV)-trainers 'the table of frameworks: ten libraries that train with PyTorch, about 2 GB and 3 minutes on 2 cores' --requirement requirements-trainers.txt --editable '.[test]'
	@$(INSTALL) $(VENV)-trainers 'fastai, which comes without what it depends on' --no-deps fastai==2.8.12
	@touch $@

environment: $(DEMO)

environments: $(READY) $(FRAMEWORKS:%=$(VENV)-%/.ready)

demo: $(DEMO)
	$(BIN)/mezzo compare --policies fp32,bf16,fp16 --seeds 3 --out runs/demo examples/digits.py --epochs 4

# Tests of libraries that are not in this stage are left out, by name: make test-all has them, and so has CI.
test: $(TEST)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not slow'

# What takes minutes: model families through torch.compile, several processes, scripts that are killed.
test-slow: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

# Both in one run, which imports once and waits for a last test once. A third worker, because some tests wait: for limits, browsers, processes.
test-all: $(READY)
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

# Some two minutes: a small training killed 200 times, while it saves too; each run must end with the bits of the undisturbed one. KILLS=20 for less.
KILLS ?= 200
crash-test: $(TEST)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m crash_test --kills $(KILLS)

# Which lines could be changed without a test noticing; half an hour or so, and not part of CI. MUTANTS=--count=20 for a few.
mutants: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt coverage
	$(BIN)/python tests/mutants.py $(MUTANTS)

test-frameworks: $(FRAMEWORKS:%=test-%)

# The wheel, installed in an environment of its own.
test-wheel: $(READY)
	.ci/wheel

# The source archive, and the wheel that it builds, in dist; what they hold is compared with the tree.
dist: $(TEST)
	$(BIN)/python -m pytest -q tests/project/test_packaging.py -k 'hold or same or version'
	$(BIN)/python -m build --outdir dist

# Which Python and torch it can be installed for: the table of docs/install.md.
resolve: $(TEST)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python .ci/resolve

test-cuda-build: $(CUDA_BUILD)/.installed
	env -u TRITON_INTERPRET $(CUDA_BUILD)/bin/python -m pytest -q tests/cuda_build tests/project/test_gpu_benchmark.py tests/engine/test_session_budget.py tests/engine/test_state_bytes.py

$(CUDA_BUILD)/.installed: pyproject.toml
	@PYTHON=$(CUDA_PYTHON) $(INSTALL) $(CUDA_BUILD) "tests of torch's CUDA build: about 6 GB and 5 minutes on 2 cores" 'torch>=2.11' --index-url https://download.pytorch.org/whl/cu130 || \
	PYTHON=$(CUDA_PYTHON) $(INSTALL) $(CUDA_BUILD) "tests of torch's CUDA build, from the index that pip is set to" 'torch>=2.11'
	$(CUDA_BUILD)/bin/python -c 'import torch, triton; assert torch.version.cuda, "this torch is no CUDA build"'
	@$(INSTALL) $(CUDA_BUILD) "tests of torch's CUDA build: pytest and Mezzo" --editable '.[test]'
	@touch $@

# A file is one worker's: its tests ask one process of the framework, which takes seconds to start. Files that take longest come first, so that
# no worker waits for the other; left to itself, xdist begins with the files that have most tests.
test-%: $(VENV)-%/.ready
	$(VENV)-$*/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/frameworks/test_table.py \
		$(wildcard tests/frameworks/test_$*_ranks.py tests/frameworks/test_$*_updates.py) tests/frameworks/test_$**.py

# The same comparison in four frameworks, then all of it in one table; one that fails has its rows in the table, too.
demo-frameworks: $(READY) $(FRAMEWORKS:%=$(VENV)-%/.ready)
	-$(BIN)/mezzo compare $(DIGITS) --out runs/frameworks/torch examples/digits.py --epochs 4
	-KERAS_BACKEND=tensorflow $(VENV)-keras/bin/mezzo compare $(DIGITS) --out runs/frameworks/keras-on-tensorflow examples/keras_digits.py
	-KERAS_BACKEND=torch $(VENV)-keras/bin/mezzo compare $(DIGITS) --out runs/frameworks/keras-on-torch examples/keras_digits.py
	-$(VENV)-paddle/bin/mezzo compare $(DIGITS) --out runs/frameworks/paddle examples/paddle_digits.py
	$(BIN)/mezzo report runs/frameworks/*/record.json

# Lint, types, laws of the tree and words: the checks of .pre-commit-config.yaml.
check: static
	$(BIN)/python -m pytest -q -n 2 tests/project/test_laws.py tests/project/test_words.py -m 'not slow'

# Every command on one small training of every framework: about an hour, and the table of docs/frameworks.md.
frameworks-table: environments $(VENV)-trainers/.ready
	$(BIN)/python -m benchmarks frameworks

static: $(TEST)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

# The benchmarks of some minutes that need no GPU. Times need a quiet machine.
bench: $(READY)
	$(BIN)/python -m benchmarks bench

# Every plain example under every policy on small data: a quarter of an hour, and the table of docs/examples.md.
examples: $(READY)
	$(BIN)/python -m benchmarks examples

# The site, in build/docs. A broken link or a page outside the tree of contents is an error.
docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html --fresh-env docs build/docs

# The README's recorded session, its picture and its table of figures. Times in the table are those of the last make bench.
readme: $(READY)
	$(BIN)/python -m benchmarks readme

# What make has made, and no more: not an environment of yours, and not your runs.
clean:
	@$(INSTALL) --remove $(VENV) $(CUDA_BUILD) $(FRAMEWORKS:%=$(VENV)-%) $(VENV)-trainers
	rm -rf build dist runs/demo runs/frameworks
