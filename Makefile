# make serve · make test · make lint: each sets itself up first, in .venv, on a machine with Python 3.11 or newer and pip.
#   make serve ARGS="./my-model --port 8123"     make test ARGS="-k tokenizer"     PIP_ARGS: more flags for pip

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
PIP_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help serve test lint format clean

help:
	@echo 'make serve   serve the built-in demo model on http://127.0.0.1:8000; ARGS="MODEL --port N" for more'
	@echo 'make test    run the tests; ARGS="-k name" for some'
	@echo 'make lint    check the style'
	@echo 'make format  apply the style'
	@echo 'make clean   remove $(VENV)'

serve: $(STAMP)
	@exec $(BIN)/python -m server serve $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

# CUDA builds of torch bring their own triton; beside a CPU build it runs the kernels' small cases in its interpreter
# a version manager's shim may exist for a Python that is not installed, so each candidate is asked
$(STAMP): pyproject.toml constraints.txt
	@set -e; python=; \
	if [ ! -x $(BIN)/python ]; then \
		for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3 python; do \
			if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo 'Quire needs Python 3.11 or newer, and none of python3.13, python3.12, python3.11, python3 is: install one, or name it with PYTHON=/path/to/python' >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$($$python --version)"; \
		"$$python" -m venv $(VENV) 2>/dev/null || { \
			rm -rf $(VENV); \
			"$$python" -m venv --without-pip $(VENV); \
			"$$python" -m pip --python $(BIN)/python install --quiet pip; \
		}; \
	fi; \
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[test]'; \
	if [ "$$(uname -sm)" = "Linux x86_64" ] && ! $(BIN)/python -c 'import triton' 2>/dev/null; then \
		$(BIN)/python -m pip install $(PIP_ARGS) triton==3.6.0; \
	fi; \
	touch $(STAMP)
