# Where Homebrew, python.org and uv install; a shell that is no login shell may not look there.
export PATH := $(PATH):/opt/homebrew/bin:/usr/local/bin:$(HOME)/.local/bin
# PYTHON=/path/to/python3.x chooses the interpreter, else scripts/bootstrap.sh finds one.
export PYTHON

.PHONY: help demo test lint clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

demo:  ## set everything up, let a small model answer, compare speculative with plain decoding
	@scripts/bootstrap.sh
	@.venv/bin/python scripts/get_smollm2.py
	@.venv/bin/python scripts/demo.py

test:  ## set everything up and run the tests
	@scripts/bootstrap.sh --dev
	@.venv/bin/python scripts/get_smollm2.py
	@.venv/bin/python -m pytest --numprocesses auto --maxprocesses 4

lint:  ## style, format and types
	@scripts/bootstrap.sh --dev
	@.venv/bin/python -m ruff check
	@.venv/bin/python -m ruff format --check
	@.venv/bin/python -m mypy

clean:  ## remove what these commands made
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
