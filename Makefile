PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
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
# "slow or not slow" adds those that start many processes.
FRAMEWORK_TESTS ?= 'not slow'

.PHONY: demo mutants environments test test-slow test-all crash-test test-cuda-build test-wheel test-frameworks demo-frameworks check static bench docs examples readme clean

# Everything below installs what it needs into .venv, and for other frameworks into .venv-keras and .venv-paddle, and nothing anywhere else.
# pip would compile on one core; left to the first import, each file's warnings would fail a test. So all cores do, afterwards.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true  # some packages have templates that end in .py
	touch $(READY)

# Only a tenth of a framework is ever imported: the last command writes the byte code of that before anything is timed.
$(VENV)-%/.ready: pyproject.toml requirements-%.txt
	$(PYTHON) -m venv --clear $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --no-compile --requirement requirements-$*.txt --editable '.[test]'
	$(VENV)-$*/bin/python -c 'import $*, sklearn.datasets'
	touch $@

environments: $(READY) $(FRAMEWORKS:%=$(VENV)-%/.ready)

demo: $(READY)
	$(BIN)/mezzo compare --policies fp32,bf16,fp16,fp16-master --seeds 3 --metric 'acc +([0-9.]+)' --out runs/demo examples/digits.py

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not slow'

# What takes minutes: model families through torch.compile, several processes, scripts that are killed.
test-slow: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

# Both in one run, which imports once and waits for a last test once. A third worker, because some tests wait: for limits, browsers, processes.
test-all: $(READY)
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

# Some two minutes: a small training killed 200 times, while it saves too; each run must end with the bits of the undisturbed one. KILLS=20 for less.
KILLS ?= 200
crash-test: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m crash_test --kills $(KILLS)

# Which lines could be changed without a test noticing; an hour or so, and not part of CI. MUTANTS=--count=20 for a few.
mutants: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt coverage
	$(BIN)/python tests/mutants.py $(MUTANTS)

test-frameworks: $(FRAMEWORKS:%=test-%)

# The wheel, installed in an environment of its own.
test-wheel: $(READY)
	.ci/wheel

test-cuda-build: $(CUDA_BUILD)/.installed
	env -u TRITON_INTERPRET $(CUDA_BUILD)/bin/python -m pytest -q tests/cuda_build tests/project/test_gpu_benchmark.py tests/engine/test_session_budget.py tests/engine/test_state_bytes.py

$(CUDA_BUILD)/.installed: pyproject.toml
	$(CUDA_PYTHON) -m venv --clear $(CUDA_BUILD)
	$(CUDA_BUILD)/bin/python -m pip install --quiet 'torch>=2.11' --index-url https://download.pytorch.org/whl/cu130 || $(CUDA_BUILD)/bin/python -m pip install --quiet 'torch>=2.11'
	$(CUDA_BUILD)/bin/python -c 'import torch, triton; assert torch.version.cuda, "this torch is no CUDA build"'
	$(CUDA_BUILD)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@

# A file is one worker's: its tests ask one process of the framework, which takes seconds to start.
test-%: $(VENV)-%/.ready
	$(VENV)-$*/bin/python -m pytest -q -n 2 --dist loadfile -m $(FRAMEWORK_TESTS) tests/frameworks/test_$**.py

# The same comparison in four frameworks, then all of it in one table; one that fails has its rows in the table, too.
demo-frameworks: $(READY) $(FRAMEWORKS:%=$(VENV)-%/.ready)
	-$(BIN)/mezzo compare $(DIGITS) --out runs/frameworks/torch examples/digits.py --epochs 4
	-KERAS_BACKEND=tensorflow $(VENV)-keras/bin/mezzo compare $(DIGITS) --out runs/frameworks/keras-on-tensorflow examples/keras_digits.py
	-KERAS_BACKEND=torch $(VENV)-keras/bin/mezzo compare $(DIGITS) --out runs/frameworks/keras-on-torch examples/keras_digits.py
	-$(VENV)-paddle/bin/mezzo compare $(DIGITS) --out runs/frameworks/paddle examples/paddle_digits.py
	$(BIN)/mezzo report runs/frameworks/*/record.json

check: static
	$(BIN)/python -m pytest -q tests/project/test_laws.py

static: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

# The benchmarks of some minutes that need no GPU. Times need a quiet machine.
bench: $(READY)
	$(BIN)/python -m benchmarks

# Every plain example under every policy on small data: a quarter of an hour, and the table of docs/examples.md.
examples: $(READY)
	$(BIN)/python -m benchmarks.examples

# The site, in build/docs. A broken link or a page outside the tree of contents is an error.
docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html --fresh-env docs build/docs

# The README's recorded session, its picture and its table of figures. Times in the table are those of the last make bench.
readme: $(READY)
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) $(CUDA_BUILD) $(FRAMEWORKS:%=$(VENV)-%) build dist runs
