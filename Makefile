# make serve · make test · make lint: each sets itself up first, in .venv, on a machine with Python 3.11 or newer and pip.
#   make serve ARGS="./my-model --port 8123"     make test ARGS="-k tokenizer"     PIP_ARGS: more flags for pip
# make test-demo · make test-clients · make test-openapi · make test-templates · make test-browser · make test-monitoring ·
# make fuzz · make chaos · make soak · make promises: slower, with downloads, or of what is not shipped, and left out of
# make test.
# make test-deploy builds the container and runs proxies, systemd and more: as root, on Debian or Ubuntu.
# The clients get environments of their own; the templates are those of two packages, of which
# nothing is installed; the browser is an installed Chromium, Prometheus an installed one as well.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := tests/clients
DEPLOY := tests/deploy $(addprefix tests/integration/test_,lifecycle.py launch.py under_fire.py service_manager.py healthcheck.py hosted.py access.py) $(addprefix tests/test_,deploy_files.py kubernetes.py locked.py scaling_page.py configuration_page.py)
FUZZ := tests/fuzz $(addprefix tests/unit/server/,http/routes/test_body.py text/test_detokenizer.py text/test_stop_strings.py api/test_validate.py)
TEMPLATES := .templates
TEMPLATE_PACKAGES := trl==1.16.0 llama-cpp-python==0.3.36
SUPPLY_CHAIN := .venv-supply-chain
CLIENT_VENVS := .venv-clients .venv-clients-openai2 .venv-openapi
ARGS ?=
PIP_ARGS ?=
# processes that run the tests; each begins with its share, and takes of another's when it is done. Three for two cores,
# as tests of servers wait for much of their time. JOBS=0: one, in which a debugger works
JOBS ?= 3
HOURS ?= 2
SPREAD := -n $(JOBS) --dist worksteal
# kernels in Triton's interpreter, in a process of its own: make test runs them, make test-unit does not
INTERPRETED := tests/unit/kernels/test_triton_interpreted.py
# without optional packages: all that starts no server, and the core of what does
BARE := .venv-bare
BARE_TESTS := tests/unit $(addprefix tests/integration/test_,serving.py quantized.py structured.py)

# packages that pass mypy --strict
STRICT := engine.core engine.interface engine.grammar server.api

.DEFAULT_GOAL := help
.PHONY: help serve test test-unit test-full test-bare coverage test-demo test-clients test-openapi test-templates models-page reference-pages configuration-page test-browser test-monitoring test-deploy fuzz chaos soak promises lint format hooks supply-chain release clean

help:
	@echo 'make serve   serve the built-in demo model on http://127.0.0.1:8000; ARGS="MODEL --port N" for more'
	@echo 'make test    run the tests but the long tails; ARGS="-k name" for some'
	@echo 'make test-unit   the quick ones of those that start no server'
	@echo 'make test-full   the long tails: full tables of cases, all examples of hypothesis, compilers'
	@echo 'make test-bare   the quick unit tests and some others without Triton, matplotlib and OpenTelemetry, in .venv-bare'
	@echo 'make coverage   branch coverage of server, engine, models and kernels; engine/core needs 95 %'
	@echo 'make test-demo   test how the demo model is taught: its corpus, its training, its examination'
	@echo 'make test-clients   drive the server with other people'"'"'s clients, in Python and on Node'
	@echo 'make test-openapi   hold the server against its OpenAPI document with schemathesis; ARGS="--examples 100" for longer'
	@echo 'make test-templates   render published chat templates, and compare with transformers'
	@echo 'make models-page   run what docs/reference/models.md shows, and write it'
	@echo 'make reference-pages   write the generated pages of docs/reference; make configuration-page: flags.md alone'
	@echo 'make test-browser   look at the pages in an installed Chromium'
	@echo 'make test-monitoring   ask an installed Prometheus every query of the dashboard, and test the alerts'
	@echo 'make test-deploy   check what is in deploy/: the container, compose, systemd, proxies and more; and the life cycle'
	@echo 'make supply-chain   pinned packages, SBOM in build/sbom, bandit, known vulnerabilities'
	@echo 'make release VERSION=X.Y.Z   version, changelog, sdist and wheel in dist/, commit, tag; DRY_RUN=1 writes nothing to git'
	@echo 'make fuzz    throw hostile input at the server; ARGS="--hypothesis-profile=long" for longer'
	@echo 'make chaos   attack a server for minutes: crowds, bombs, stopped and killed processes; ARGS="--seed N" for the same again'
	@echo 'make soak HOURS=2   a steady mixed load, and how fast each process grows'
	@echo 'make promises   measure what docs/reference/promises.md shows; ARGS="kills drain" for parts'
	@echo 'make lint    check style, types and spelling'
	@echo 'make format  apply the style'
	@echo 'make hooks   have git check style, types and spelling before each commit'
	@echo 'make clean   remove what make made'

serve: $(STAMP)
	@exec $(BIN)/python -m server serve $(ARGS)

# some containers set it: each of hundreds of processes would compile us anew
test test-unit test-full test-bare coverage test-demo: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-unit: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD) -m 'not gpu and not full and not slow' tests/unit --ignore $(INTERPRETED) $(ARGS)

test-full: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD) -m 'not gpu and (full or hypothesis)' --hypothesis-profile=full $(ARGS)

test-bare: $(BARE)/.installed
	$(BARE)/bin/python -m pytest $(SPREAD) -m 'not gpu and not full and not slow' $(BARE_TESTS) $(ARGS)

# failed tests end it at its end. Processes that a test kills leave no data, or half of it, which is no use
coverage: $(STAMP)
	rm -f .coverage .coverage.*
	status=0; $(BIN)/python -m coverage run -m pytest $(SPREAD) $(ARGS) || status=$$?; \
	$(BIN)/python -W ignore -m coverage combine --quiet && rm -f .coverage.* && \
	$(BIN)/python -m coverage report && \
	$(BIN)/python -m coverage report --include='engine/core/*' --fail-under=95 && exit $$status

test-demo: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD) tests/demo_model $(ARGS)

test-clients: $(STAMP) .venv-clients/.installed .venv-clients-openai2/.installed $(CLIENTS)/node/.installed
	.venv-clients/bin/python -m pytest $(CLIENTS) --ignore $(CLIENTS)/openai2 $(ARGS)
	.venv-clients-openai2/bin/python -m pytest $(CLIENTS)/openai2 $(CLIENTS)/test_openai_chat.py $(CLIENTS)/test_openai_responses.py $(ARGS)

test-openapi: $(STAMP) .venv-openapi/.installed
	.venv-openapi/bin/python -m pytest tests/openapi $(ARGS)

test-templates: $(STAMP) $(TEMPLATES)/.installed
	$(BIN)/python -m pytest tests/templates $(ARGS)

models-page: $(STAMP) $(TEMPLATES)/.installed
	$(BIN)/python -m tests.models_page

reference-pages: $(STAMP)
	$(BIN)/python -m tests.reference_pages

configuration-page: $(STAMP)
	$(BIN)/python -m tests.configuration_page

test-browser: $(VENV)/.installed-browser
	$(BIN)/python -m pytest $(SPREAD) tests/browser $(ARGS)

test-monitoring: $(STAMP)
	$(BIN)/python -m pytest tests/monitoring $(ARGS)

test-deploy: $(VENV)/.installed-deploy
	$(BIN)/python -m pytest $(DEPLOY) -m "not gpu" -W ignore::DeprecationWarning:ray.serve._private.config $(ARGS)

fuzz: $(STAMP)
	$(BIN)/python -m pytest $(FUZZ) --hypothesis-profile=fuzz $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(ARGS)

soak: $(STAMP)
	$(BIN)/python -m tests.soak --hours $(HOURS) $(ARGS)

promises: $(STAMP)
	$(BIN)/python -m benchmarks.promises $(ARGS)

supply-chain: $(SUPPLY_CHAIN)/.installed
	for step in "lock --check" "sbom build/sbom" bandit audit; do $(SUPPLY_CHAIN)/bin/python deploy/supply_chain.py $$step || exit; done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent $(addprefix -p ,$(STRICT))
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(STAMP)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[test,dev]'
	$(BIN)/pre-commit install

release: $(STAMP)
	$(BIN)/python deploy/release.py "$(VERSION)" $(if $(DRY_RUN),--dry-run)

clean:
	rm -rf $(VENV) $(BARE) $(TEMPLATES) $(SUPPLY_CHAIN) $(CLIENT_VENVS) $(CLIENTS)/node/node_modules $(CLIENTS)/node/.installed

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

$(VENV)/.installed-browser: $(STAMP)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[test,browser]'
	touch $@

$(VENV)/.installed-deploy: $(STAMP) deploy/requirements-supply-chain.txt
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[test,deploy,ray]' -r deploy/requirements-supply-chain.txt
	touch $@

# the interpreter that $(VENV) was made with makes these too. Some builds of torch bring Triton
$(BARE)/.installed: pyproject.toml constraints.txt | $(STAMP)
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -m pip --python $(@D)/bin/python install $(PIP_ARGS) -c constraints.txt -e . pytest pytest-xdist hypothesis openai anthropic trustme
	$(BIN)/python -m pip --python $(@D)/bin/python uninstall --yes --quiet triton matplotlib opentelemetry-sdk
	touch $@

.venv-clients/.installed: $(CLIENTS)/requirements.txt | $(STAMP)
.venv-clients-openai2/.installed: $(CLIENTS)/openai2/requirements.txt | $(STAMP)
.venv-openapi/.installed: tests/openapi/requirements.txt | $(STAMP)
$(SUPPLY_CHAIN)/.installed: deploy/requirements-supply-chain.txt | $(STAMP)
$(CLIENT_VENVS:=/.installed) $(SUPPLY_CHAIN)/.installed:
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -m pip --python $(@D)/bin/python install $(PIP_ARGS) -r $<
	touch $@

# trl has a wheel; llama-cpp-python is fetched as its source
$(TEMPLATES)/.installed:
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary llama-cpp-python $(PIP_ARGS) -d $(@D) $(TEMPLATE_PACKAGES)
	cd $(@D) && tar xzf llama_cpp_python-*.tar.gz --wildcards '*/models/templates/*.jinja' && rm llama_cpp_python-*.tar.gz
	cd $(@D) && $(abspath $(BIN))/python -m zipfile -e trl-*.whl trl && rm trl-*.whl
	touch $@

# without Node its tests are skipped
$(CLIENTS)/node/.installed: $(CLIENTS)/node/package-lock.json
	if command -v npm >/dev/null; then cd $(CLIENTS)/node && npm ci --no-audit --no-fund; fi
	touch $@
