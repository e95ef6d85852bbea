# The commands of this project; `make` alone lists them. Each installs what it needs into .venv, or uses the Python at
# hand where that one has everything (tools/environment.py).
#
#   PYTHON   the Python to start from                         make test PYTHON=python3.12
#   TORCH    what to install where no torch >= 2.11 is found  make demo TORCH=torch==2.12.0
#   ARGS     arguments of the demo                            make demo ARGS="--steps 50 --dtype bfloat16"
#   PYTEST   arguments of pytest                              make test PYTEST="-k edges -x"

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
ARGS ?=
PYTEST ?=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# What reaches the compiled library, without subprocesses and torch.compile.
SANITIZED_TESTS = $(addprefix tests/test_,$(addsuffix .py,count_scale cross_entropy edges edges_plain errors \
	extreme_logits modules properties publish sampling scalars shard_ops values))
CXX_FILES = $$(find csrc tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \))

# $(call python,NAMES) sets py to an interpreter with the packages of requirements/NAMES.txt. Its tools come first on the
# PATH, then those of PYTHON, whose packages it may see.
python = py=$$($(PYTHON) tools/environment.py --venv '$(VENV)' --torch '$(TORCH)' $(1)); \
	PATH="$${py%/*}:$$(dirname "$$(command -v '$(PYTHON)')"):$$PATH"
# Compiles in place what has changed since the last time.
compile = "$$py" setup.py --quiet egg_info build_ext --inplace
# The same with tests/native, which shows C++ internals to pytest, where pybind11 is there.
compile_tests = SYNCFREE_NATIVE=$$("$$py" -c 'import pybind11' 2>/dev/null && echo 1 || echo 0) $(compile)
# A worker a core, each with whole files, whose fixtures they share; where pytest-xdist is there.
parallel = $$("$$py" -c 'import xdist' 2>/dev/null && echo --numprocesses auto --maxprocesses 8 --dist loadfile)

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## train a small language model with the fused head and with the plain one, side by side
	@$(call python,build demo); $(compile); "$$py" examples/train_lm.py $(ARGS)

.PHONY: test
test: ## run the tests (on the GPU too, if there is one)
	@$(call python,build test integrations); $(compile_tests); "$$py" -m pytest -m 'not slow' $(parallel) $(PYTEST)

.PHONY: test-cuda
test-cuda: ## run all tests, the slow ones too, and fail where no GPU is found
	@$(call python,build test integrations); $(compile_tests); SYNCFREE_FAIL_WITHOUT_CUDA=1 "$$py" -m pytest $(parallel) $(PYTEST)

# The CPU library with the compiler's sanitizers, in a package of its own. What they add has to be in the process before
# anything else; fresh memory holds NaN, and a call that asks for too much memory gets an error, not an abort.
SANITIZERS := address,undefined,float-cast-overflow
sanitized = mkdir -p build/sanitize; \
	cmake -G Ninja -S . -B build/sanitize -DSYNCFREE_CUDA=OFF -DSYNCFREE_SANITIZE=$(SANITIZERS) \
		-DPython3_EXECUTABLE="$$py" >build/sanitize/configure.log; \
	cmake --build build/sanitize --target _C; \
	(cd syncfree_ext && find . -name '*.py' -o -name '*.html' | tar cf - -T -) | tar xf - -C build/sanitize/syncfree_ext; \
	export PYTHONPATH="$(CURDIR)/build/sanitize"; \
	export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_malloc_fill_size=268435456:malloc_fill_byte=255; \
	export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1; \
	preload=$$(printf '%s ' $$(for name in asan ubsan stdc++; do $${CXX:-g++} -print-file-name=lib$$name.so; done))

.PHONY: fuzz
fuzz: ## random calls of every op on the CPU library, built with the compiler's sanitizers
	@$(call python,build test syncs); $(sanitized); LD_PRELOAD="$$preload" "$$py" tools/fuzz.py $(ARGS)

# The script, not `-m pytest`: that would look for the package in this folder first.
.PHONY: test-sanitized
test-sanitized: ## the CPU tests of the loss and of the loop's parts on that library
	@$(call python,build test); $(sanitized); run="$$(command -v pytest)"; \
	LD_PRELOAD="$$preload" "$$py" "$$run" -m 'not slow and not cuda' $(parallel) $(SANITIZED_TESTS) $(PYTEST)

.PHONY: build
build: ## compile the libraries in place
	@$(call python,build); $(compile)

.PHONY: lint
lint: ## ruff, mypy and clang-format, changing nothing
	@$(call python,build lint); set -x; \
	"$$py" -m ruff check .; \
	"$$py" -m ruff format --check .; \
	"$$py" -m mypy; \
	clang-format --dry-run -Werror $(CXX_FILES)

.PHONY: format
format: ## apply ruff and clang-format
	@$(call python,build lint); set -x; \
	"$$py" -m ruff check --fix .; \
	"$$py" -m ruff format .; \
	clang-format -i $(CXX_FILES)

.PHONY: figures
figures: ## renew the plots and the README's table from bench/results
	@$(call python,bench); "$$py" -m bench figures

.PHONY: wheel
wheel: ## build the wheel into dist/
	@rm -rf build/lib* build/bdist* dist/syncfree_ext-*.whl; \
	$(call python,build); "$$py" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .; ls -l dist

.PHONY: wheel-check
wheel-check: wheel ## check the wheel's contents, tags and ABI, and run some tests against it installed
	@$(call python,build wheel); "$$py" tools/check_wheel.py dist/syncfree_ext-*.whl

.PHONY: docs
docs: ## build the documentation site into build/site
	@$(call python,docs); NO_MKDOCS_2_WARNING=1 "$$py" -m mkdocs build --quiet --strict; echo build/site/index.html

.PHONY: clean
clean: ## remove build outputs and caches; .venv stays
	rm -rf build dist wheelhouse *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis compile_commands.json
	rm -f syncfree_ext/*.so demo.png demo.json
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
