# Everything here works on a fresh Debian with Python, pip and make: the first target sets up .venv/ by itself.
PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
DOCS_SITE ?= build/site
PY := $(VENV)/bin/python
CHECKED := ckpt_patches megatron/patches deepspeed_patches nvrx_patches apex_patches torch_patches tests
SPELLED := *.md docs/*.md docs/*/*.md ckpt_patches megatron deepspeed_patches nvrx_patches apex_patches torch_patches
# Three for two cores: some wait. With bytecode, as pytest compiles all test files in each process.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n 3 --dist worksteal
SLOW := $(PYTEST) -m "slow and not exhaustive"

.PHONY: test test-all test-gpu quick lint bench stacks demo prove explore docs clean

# Formatting, lint, types, the tests of the engine, the hook, the formats and the tools, and the proofs of a dozen fixes.
test: lint
	$(PYTEST) -m "not slow and not exhaustive"

# What CI runs besides: all proofs, on the oldest and the newest release with the bug, the patches for upstream, and what
# takes long of the rest. In two parts: what the first has imported and shares on the disk is gone for the second.
test-all: $(VENV)/ready
	$(SLOW) tests/fixes tests/contract
	$(SLOW) --ignore=tests/fixes --ignore=tests/contract

# On a machine with a GPU, in a few minutes: saves and resumes there, the proofs of fixes over NCCL, and what a fingerprint
# costs. Ranks share the GPU.
test-gpu: $(VENV)/ready
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -m gpu -s tests/trainers tests/benchmarks

# The tests that run no upstream package: less than a minute.
quick: $(VENV)/ready
	$(PYTEST) -m quick

lint: $(VENV)/ready
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy $(CHECKED)
	$(PY) -m codespell_lib $(SPELLED)
	$(PY) tests/symptoms_page.py --check
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

bench: $(VENV)/ready
	$(PY) -m pytest tests/benchmarks -s

# Configurations that nobody listed, judged: `make explore MINUTES=60 [SEED=…] [PACKAGE=megatron] [VERSION=…] [FIXES=off]
# [WITHOUT=fix]`, or one of them, `make explore CASE=tests/explore/corpus/….json`.
explore: $(VENV)/ready
	PYTHONPATH=tests $(PY) -m explore

# `make prove` in an environment of each stack that people run, which pip makes: `make stacks [ROW=verl_0.9] [KEEP=1]`.
# A row takes minutes, and gigabytes in .stacks/ while it runs. ROW=hugging_face: Transformers and Accelerate. It prints
# a line for each row; docs/reference/compatibility.md is written by hand.
stacks: $(VENV)/ready
	PYTHONPATH=tests $(PY) -m stacks

# Eight bugs, without and with the patches. Others: `.venv/bin/python tests/demo.py FIX...`.
demo: $(if $(wildcard $(VENV)/ready),$(VENV)/ready,$(VENV)/demo)
	$(PY) tests/demo.py

# Whether the fixes that are active in an environment do what they should, on its own packages: a line for each test as
# it ends. `make prove SITE=/path/to/site-packages`; PYTHON is the environment's Python, by default python3.
prove: $(VENV)-prove/ready
	$(VENV)-prove/bin/python -m pytest tests/fixes --verbose -p no:cacheprovider --site "$(SITE)"

# The site, in build/site/: a warning is an error, and so is a link within it that leads nowhere.
docs: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=true $(DOCS_VENV)/bin/python -m mkdocs build --site-dir $(DOCS_SITE)

# Debian ships venv without ensurepip unless python3-venv is there; pip then puts itself into the environment.
$(VENV)/ready: EXTRA = test
$(VENV)/demo: EXTRA = demo
$(VENV)-prove/ready: EXTRA = prove
$(VENV)/ready $(VENV)/demo $(VENV)-prove/ready: setup.py pyproject.toml training_checkpoint_patches.pth
	test -x $(@D)/bin/python && $(@D)/bin/python -m pip --version || $(PYTHON) -m venv --clear $(@D) || { \
	  $(PYTHON) -m venv --clear --without-pip $(@D) && $(PYTHON) -m pip --python $(@D)/bin/python install --quiet pip; }
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRA)]'
	touch $@

$(DOCS_VENV)/ready: docs/requirements.txt
	$(PYTHON) -m venv --clear $(DOCS_VENV) || { $(PYTHON) -m venv --clear --without-pip $(DOCS_VENV) && \
	  $(PYTHON) -m pip --python $(DOCS_VENV)/bin/python install --quiet pip; }
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-prove $(DOCS_VENV) .editable .explore .stacks .trees build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
