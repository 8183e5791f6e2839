# `make help` lists the targets. Each sets up what it needs, and does nothing twice.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help setup demo check format test test-all

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## Make .venv with everything that training and developing need
	@$(PYTHON) tools/setup.py $(VENV)

demo: setup  ## Train a small model on Dakota grammar and show that it got better (about ten minutes)
	@$(BIN)/buckeye demo

check: setup  ## Format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## Format the code and apply the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup  ## The tests that every change must pass
	$(BIN)/pytest -m "not slow and not gpu"

test-all: setup  ## Slow tests too, and those for a GPU where there is one
	$(BIN)/pytest
