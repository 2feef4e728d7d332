# make demo   set up, and show a draft tree at work on a real model
# make test   set up, lint, check types and import direction, run the tests
# make docs   write the pages that are generated from the code
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Threads that spin while they wait slow each other down many times over on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint docs setup clean

setup: $(READY)

$(READY): pyproject.toml .ci/setup
	.ci/setup $(VENV)
	touch $(READY)

demo: $(READY)
	$(BIN)/trtllm-tree generate --config configs/demo.yaml --compare --max-tokens 96

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

docs: $(READY)
	$(BIN)/python -m trtllm_tree.support.page > docs/support.md.new
	mv docs/support.md.new docs/support.md

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache
