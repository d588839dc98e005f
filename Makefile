# make quickstart   install, build the toy, train it with RL, report      make test   install, run every test
# EXTRA=cpu|gpu overrides what is detected; PYTHON picks the interpreter (3.11 or 3.12, for gpu 3.12).

SHELL := /bin/bash
EXTRA ?= $(if $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -m1 GPU),gpu,cpu)
# $(call interpreter,11): the first one here that is Python 3.11 or 3.12
interpreter = $(firstword $(foreach p,python3 python3.12 python3.11 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12),$(if $(shell $(p) -c 'import sys; sys.exit(not (3, $(1)) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo ok),$(p))))
PYTHON ?= $(call interpreter,$(if $(filter gpu,$(EXTRA)),12,11))
BIN := .venv/bin

# A file's tests stay on one worker. A worker that dies ends the session: another would begin with what has killed it.
SPREAD := --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: quickstart test test-slow faults rehearse kill-test test-recipes check install install-dev lint resolve-gpu check-gpu-set constraints docs clean help

help:
	@sed -n '1,2s/^# //p' Makefile

install: .venv/.installed-$(EXTRA)
install-dev: .venv/.installed-$(EXTRA)-dev

.venv/.installed-%: pyproject.toml constraints/cpu.txt constraints/gpu.txt constraints/overrides-cpu.txt constraints/overrides-gpu.txt tools/install.sh
	@PYTHON="$(PYTHON)" bash tools/install.sh $(subst -,$(comma),$*)
	@touch $@ $(@:-dev=)  # what tests need holds all that a run needs
comma := ,

quickstart: install
	@$(BIN)/megatron-rl quickstart

# Everything that is no whole run and starts no engine. Three workers keep two cores busy, as many tests wait for what they
# start; WORKERS chooses others.
test: install-dev
	@$(BIN)/python -m pytest -m "not slow" -n $(or $(WORKERS),3) $(SPREAD)

# The rest: whole runs, and real engines; and of the faults below the quick ones, in two minutes: one run of whose processes
# each kind is stopped (SIGSTOP) and killed (SIGKILL).
test-slow: install-dev
	@$(BIN)/python -m pytest -m slow -n $(or $(WORKERS),2) $(SPREAD)
	@$(BIN)/python -m pytest --faults tests/faults/test_each_process.py

# Whole runs under faults (tests/faults/), with a table at the end; half an hour on two cores. Without what the two targets
# below do. Faults that need no whole run are in `make test` and `make test-slow` (marker `fault`).
faults: install-dev
	@$(BIN)/python -m pytest -vv --faults tests/faults -n $(or $(WORKERS),2) $(SPREAD) --ignore=tests/faults/test_rehearsals.py --ignore=tests/faults/test_kill.py

# Every batch script on a Slurm cluster made for the occasion, and all that happens to jobs; about half an hour, as root.
rehearse: install-dev
	@$(BIN)/python -m pytest --faults tests/faults/test_rehearsals.py

# A run is killed at 30 random moments, and goes on each time (KILLS and SEED choose others); about 40 minutes.
kill-test: install-dev
	@KILLS=$${KILLS:-30} $(BIN)/python -m pytest --faults tests/faults/test_kill.py -s

# Every recipe takes two steps with a small model of its family; about half an hour.
test-recipes: install-dev
	@$(BIN)/python -m pytest --recipes tests/test_recipes.py

lint: install-dev
	@$(BIN)/shellcheck docker/*.sh && $(BIN)/hadolint docker/Dockerfile
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-logo && $(BIN)/python tools/size.py

# Does the gpu extra still resolve as one set? Nothing is installed.
resolve-gpu: install-dev
	@bash tools/install.sh --resolve gpu

# The GPU set on a machine without a GPU: installed into an environment of its own, imported, and held against what this
# project expects of it. 9 GB; the first time compiles for three minutes of a core.
check-gpu-set:
	@bash .ci/gpu-set

.venv-gpu/.installed: pyproject.toml constraints/gpu.txt constraints/overrides-gpu.txt tools/install.sh tools/te_binding.sh
	@VENV=.venv-gpu PYTHON="$(call interpreter,12)" bash tools/install.sh gpu,dev
	@touch $@

# Refreshes the pins after a change of pyproject.toml.
constraints: install-dev
	@bash tools/install.sh --resolve cpu > constraints/cpu.txt.new && mv constraints/cpu.txt.new constraints/cpu.txt
	@bash tools/install.sh --resolve gpu > constraints/gpu.txt.new && mv constraints/gpu.txt.new constraints/gpu.txt

# The documentation as a site in build/docs, without network; a missing page or anchor is an error.
docs: install-dev
	@$(BIN)/sphinx-build -q -W --keep-going -c docs . build/docs && echo build/docs/docs/index.html

clean:
	rm -rf .venv .venv-gpu build *.egg-info
