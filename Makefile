# Two commands do all the set-up: `make demo` and `make test`. Both create .venv when it is missing.
PYTHON ?= python3
VENV = .venv
VENV_MIN = .venv-min
INSTALLED = $(VENV)/.installed
INSTALLED_MIN = $(VENV_MIN)/.installed

.PHONY: demo bench test test-min chaos fuzz mutants lint types docs format wheel clean

demo: $(INSTALLED)
	$(VENV)/bin/greedynas demo

# Several ways to run supernets, side by side on this machine. BENCH="mobilenet --out bench.json" for other than the usual.
bench: $(INSTALLED)
	$(VENV)/bin/greedynas bench $(BENCH)

# Two tests at a time, each of them with few threads; then alone those that measure time.
PYTEST = -m pytest -n 2 --dist loadfile -m "not timed"
PYTEST_TIMED = -m pytest -m timed

test: $(INSTALLED)
	$(VENV)/bin/python $(PYTEST)
	$(VENV)/bin/python $(PYTEST_TIMED)

# The suite with the oldest supported versions, the ones of our GPU machine.
test-min: $(INSTALLED_MIN)
	$(VENV_MIN)/bin/python $(PYTEST)
	$(VENV_MIN)/bin/python $(PYTEST_TIMED)

# Faults on purpose, a suite of its own: kill -9, full disks, lost files, two at once… About five minutes on two cores.
chaos: $(INSTALLED)
	$(VENV)/bin/python -m tests.chaos

# Wrong code on purpose, one change at a time: does a test notice? All of it takes a night; MUTANTS="--module pool" minutes.
mutants: $(INSTALLED)
	$(VENV)/bin/python tools/mutants.py $(MUTANTS)

# Malformed input of all kinds: the corpus, then new ones for so many seconds. What goes wrong is kept in tests/fuzz/corpus.
SECONDS ?= 600

fuzz: $(INSTALLED)
	$(VENV)/bin/python -m tests.fuzz --seconds $(SECONDS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/ruff format --check .

types: $(INSTALLED)
	$(VENV)/bin/mypy

# The documentation site, in site/.
docs: $(INSTALLED)
	$(VENV)/bin/mkdocs build --strict --quiet

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

wheel: $(INSTALLED)
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(VENV_MIN) dist site

# The newest versions that were tested. CONSTRAINTS=/dev/null installs whatever is newest today.
CONSTRAINTS ?= constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,docs]'
	touch $@

$(INSTALLED_MIN): pyproject.toml requirements-min.txt
	$(PYTHON) -m venv $(VENV_MIN)
	$(VENV_MIN)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements-min.txt -e '.[dev]'
	touch $@
