# Two commands do everything on a fresh machine, with a GPU or without:
#
#   make sweep    set up, build, and run the main job: 84 MoE configurations
#   make test     set up, build, and run the tests: test-gpu, test-ranks, test-cpu (-j2: the last beside them)
#
# Set-up means .venv with torch, the requirements and the built package (tools/bootstrap.py).
#   make PYTHON=python3.12          another interpreter
#   make TORCH_INDEX=URL            where torch comes from
#   make test EXTRA=dev             also the linters and checkers

PYTHON ?= python3
EXTRA ?= test
TORCH_INDEX ?=
VENV := .venv
BUILT := $(VENV)/built-$(EXTRA)
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml tools/build_facts.py tools/bootstrap.py
# Workers for tests/cpu: a test may start several processes itself, so one for every four cores.
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS := $(shell n=$$(($(CORES) / 4)); [ $$n -ge 2 ] && echo "-n $$((n < 12 ? n : 12))")
RANKS := $(shell n=$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); [ $$n -ge 2 ] && echo 2)

.PHONY: all setup sweep test test-cpu test-gpu test-ranks lint clean
.DEFAULT_GOAL := setup

setup: $(BUILT)

$(BUILT): $(SOURCES)
	$(PYTHON) tools/bootstrap.py --extra $(EXTRA) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@touch $@

sweep: $(BUILT)
	$(VENV)/bin/python benchmarks/sweep_84.py

test: test-gpu test-ranks test-cpu

# Without GPUs in sight: these tests are about machines that have none.
test-cpu: $(BUILT)
	CUDA_VISIBLE_DEVICES= $(VENV)/bin/python -m pytest tests/cpu $(WORKERS) $(PYTEST_ARGS)

# Tests between ranks skip here, with the reason.
test-gpu: $(BUILT)
	$(VENV)/bin/python -m pytest tests/gpu tests/dist $(PYTEST_ARGS)

# One launch per file of tests/dist: a second NCCL group in one process was seen to hang.
test-ranks: test-gpu
ifeq ($(RANKS),2)
	for file in tests/dist/test_*.py; do \
	  $(VENV)/bin/python -m torch.distributed.run --nproc-per-node 2 -m pytest $$file -x || exit 1; \
	done
endif

lint: $(BUILT)
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH tools/lint.sh

clean:
	rm -rf build $(VENV) xstage_ext/*.so *.egg-info
