# `make demo` and `make test` need no other set-up: both create .venv if it is missing.
PYTHON ?= python3
VENV = .venv
VENV_MIN = .venv-min
VENV_RUNTIMES = .venv-runtimes
INSTALLED = $(VENV)/.installed
INSTALLED_MIN = $(VENV_MIN)/.installed
INSTALLED_RUNTIMES = $(VENV_RUNTIMES)/.installed

.PHONY: demo bench test test-runtimes test-min chaos fuzz mutants lint types docs format wheel clean

demo: $(INSTALLED)
	$(VENV)/bin/greedynas demo

# Compare several ways to run supernets on this machine. BENCH="mobilenet --out bench.json" passes arguments.
bench: $(INSTALLED)
	$(VENV)/bin/greedynas bench $(BENCH)

# Two tests at a time, each with few threads; the tests that measure time run on their own afterwards.
PYTEST = -m pytest -n 2 --dist loadfile -m "not timed"
PYTEST_TIMED = -m pytest -m timed

test: $(INSTALLED)
	$(VENV)/bin/python $(PYTEST)
	$(VENV)/bin/python $(PYTEST_TIMED)

# The tests of the export formats with the runtimes of devices, in an environment of their own.
test-runtimes: $(INSTALLED_RUNTIMES)
	$(VENV_RUNTIMES)/bin/python $(PYTEST) tests/deploy

# The tests with the oldest supported versions, which are those of our GPU machine.
test-min: $(INSTALLED_MIN)
	$(VENV_MIN)/bin/python $(PYTEST)
	$(VENV_MIN)/bin/python $(PYTEST_TIMED)

# Fault injection: kill -9, full disks, lost files, two processes at once… Takes about five minutes on two cores.
chaos: $(INSTALLED)
	$(VENV)/bin/python -m tests.chaos

# Mutation testing: change the code in one place at a time and check that a test fails. The whole run takes a night,
# MUTANTS="--module pool" takes minutes.
mutants: $(INSTALLED)
	$(VENV)/bin/python tools/mutants.py $(MUTANTS)

# Fuzzing: run the corpus, then new malformed input for SECONDS seconds. Failing inputs are kept in tests/fuzz/corpus.
SECONDS ?= 600

fuzz: $(INSTALLED)
	$(VENV)/bin/python -m tests.fuzz --seconds $(SECONDS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/ruff format --check .

types: $(INSTALLED)
	$(VENV)/bin/mypy

# Build the documentation site in site/.
docs: $(INSTALLED)
	$(VENV)/bin/mkdocs build --strict --quiet

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

wheel: $(INSTALLED)
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(VENV_MIN) $(VENV_RUNTIMES) dist site

# The newest tested versions. CONSTRAINTS=/dev/null installs the newest versions that exist.
CONSTRAINTS ?= constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,docs]'
	touch $@

# It sees the packages of VENV, so that only those of the runtimes are installed: not PyTorch once more. LiteRT is left out,
# because its converter needs an older one.
RUNTIMES = openvino,executorch,ncnn,coreml

$(INSTALLED_RUNTIMES): $(INSTALLED)
	$(PYTHON) -m venv $(VENV_RUNTIMES)
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(VENV_RUNTIMES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(VENV_RUNTIMES)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(RUNTIMES)]'
	touch $@

$(INSTALLED_MIN): pyproject.toml requirements-min.txt
	$(PYTHON) -m venv $(VENV_MIN)
	$(VENV_MIN)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements-min.txt -e '.[dev]'
	touch $@
