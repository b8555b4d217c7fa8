# `make demo` and `make test` need Python 3.10+ and a C compiler; each makes .venv and installs what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip --disable-pip-version-check -q

TORCH        = torch==2.13.0
NEWEST       = triton==3.9.0 transformers==5.24.0 flash-linear-attention==0.6.0 diffusers==0.42.1
# Files stay together: importing the upstream libraries takes longer than most files' tests.
PARALLEL     = -n 2 --dist loadfile
OLDEST       = transformers==5.17.0 flash-linear-attention==0.5.2 fla-core==0.5.2 triton==3.7.1 kernels==0.16.2

.PHONY: demo test test-oldest check lint types clean

demo: $(VENV)/.installed
	$(BIN)/python -m accel demo

test: $(VENV)/.installed check
	$(BIN)/python -m pytest $(PARALLEL)

# The oldest libraries that are supported, in an environment of their own.
test-oldest: $(VENV)-oldest/.installed
	$(VENV)-oldest/bin/python -m pytest $(PARALLEL) compat_tests/patches compat_tests/models

check: lint types

lint: $(VENV)/.installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

# The type checker reads the mapped tree, as a wheel lays it out: there accel.kernels and accel.patches resolve.
types: $(VENV)/.installed
	rm -rf build/typed && mkdir -p build/typed
	cp -r accel build/typed/accel && cp -r kernels build/typed/accel/kernels && cp -r patches build/typed/accel/patches
	cd build/typed && MYPYPATH=. $(abspath $(BIN))/python -m mypy --config-file ../../pyproject.toml -p accel

$(VENV)/.installed: pyproject.toml setup.py Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -U pip
	$(PIP) install $(TORCH) $(NEWEST)
	$(PIP) install $(TORCH) -e '.[cuda,fla,transformers,diffusers,test]'
	touch $@

$(VENV)-oldest/.installed: pyproject.toml setup.py Makefile
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install -q -U pip
	$(VENV)-oldest/bin/python -m pip install -q $(TORCH)
	$(VENV)-oldest/bin/python -m pip install -q $(TORCH) $(OLDEST) pytest pytest-xdist hypothesis diffusers==0.42.1
	$(VENV)-oldest/bin/python -m pip install -q --no-deps -e .
	$(VENV)-oldest/bin/python -m pip install -q wrapt packaging rich
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest build *.egg-info
