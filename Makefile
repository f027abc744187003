# Everything here works on a fresh Debian with Python, pip and make: the first target sets up .venv/ by itself.
PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
SITE ?= build/site
PY := $(VENV)/bin/python
CHECKED := ckpt_patches megatron/patches deepspeed_patches nvrx_patches apex_patches torch_patches tests
SPELLED := *.md docs/*.md ckpt_patches megatron deepspeed_patches nvrx_patches apex_patches torch_patches
# Three for two cores: some wait. Each begins with a third of the tests, in order: what a file shares is made for one.
# With bytecode, as pytest compiles all test files in each process.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n 3 --dist worksteal

.PHONY: test fixes rest older quick test-all lint check bench stacks writers upstream demo compatibility explore pictures docs
.PHONY: clean

# Formatting, lint, types, wording, and the tests of the engine, the hook, the formats and the tools.
test: lint check

# Each fix on the newest release with its bug: the contract of all fixes, and its own tests, without and with it.
fixes: $(VENV)/ready
	CKPT_PATCHES_TEST_FIXES=1 $(PYTEST)

# What else takes long on the newest releases.
rest: $(VENV)/ready
	CKPT_PATCHES_TEST_REST=1 $(PYTEST)

# Older releases, combinations, the patches for upstream, some fixes in place. All four together are what CI runs.
older: $(VENV)/ready
	CKPT_PATCHES_TEST_OLDER=1 $(PYTEST)

# The tests of the engine, the hook, formats and planners: less than a minute.
quick: $(VENV)/ready
	$(PYTEST) -m quick

# The tests on every upstream release, and the pages that are made from their results.
test-all: lint
	rm -f tests/recorded/compatibility.json
	CKPT_PATCHES_TEST_ALL=1 $(PYTEST); status=$$?; \
	  $(PY) tests/compatibility.py && exit $$status

check: $(VENV)/ready
	$(PYTEST)

lint: $(VENV)/ready
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy $(CHECKED)
	$(PY) -m codespell_lib $(SPELLED)
	$(PY) tests/wording.py
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

bench: $(VENV)/ready
	$(PY) -m pytest tests/benchmarks -s

# Configurations that nobody listed, judged: `make explore MINUTES=60 [SEED=…] [PACKAGE=megatron] [VERSION=…] [FIXES=off]
# [WITHOUT=fix]`, or one of them, `make explore CASE=tests/explore/corpus/….json`.
explore: $(VENV)/ready
	PYTHONPATH=tests $(PY) -m explore

# The stacks that people run, each in an environment of its own that pip makes: `make stacks [ROW=verl_0.9] [KEEP=1]`.
# A row takes minutes, and gigabytes in .stacks/ while it runs. FIX=…: a new fix alone, in all rows. ROW=hugging_face:
# Transformers and Accelerate.
stacks: $(VENV)/ready
	PYTHONPATH=tests $(PY) -m stacks

# Trainers without a fix here, each in an environment of its own: their own code saves, and the audit reads it.
# `make writers [WRITER=verl]`; a gigabyte each in .writers/, kept for the next run.
writers: $(VENV)/ready
	PYTHONPATH=tests $(PY) -m writers && $(PY) tests/writers/page.py

# What has changed in the newest release and the main branch of each package since the last record: minutes.
upstream: $(VENV)/ready
	PYTHONPATH=tests $(PY) tests/keeping_up.py

# Eight bugs, without and with the patches; `make demo ALL=1` shows those of all fixes.
demo: $(VENV)/ready
	$(PY) tests/demo.py $(if $(ALL),--all)

compatibility: $(VENV)/ready
	$(PY) tests/compatibility.py

# The picture of docs/: the map.
pictures: $(VENV)/ready
	$(PY) tests/map_page.py

# The site, in build/site/: a warning is an error, and so is a link within it that leads nowhere.
docs: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=true $(DOCS_VENV)/bin/python -m mkdocs build --site-dir $(SITE)

# Debian ships venv without ensurepip unless python3-venv is there; pip then puts itself into the environment.
$(VENV)/ready: setup.py pyproject.toml training_checkpoint_patches.pth
	test -x $(PY) && $(PY) -m pip --version || $(PYTHON) -m venv --clear $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(PY) install --quiet pip; }
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

$(DOCS_VENV)/ready: docs/requirements.txt
	$(PYTHON) -m venv --clear $(DOCS_VENV) || { $(PYTHON) -m venv --clear --without-pip $(DOCS_VENV) && \
	  $(PYTHON) -m pip --python $(DOCS_VENV)/bin/python install --quiet pip; }
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) .editable .explore .stacks .trees .writers build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
