PYTHON ?= python3
BIN := .venv/bin
NEWEST := .venv-newest

# Else each of the many processes of a run would compile the package and the tests again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test test-newest slow accelerator fuzz mutants house lint types docs demo examples bench clean
.NOTPARALLEL:

# Three workers on two cores: a fifth of the time of two is waits.
test: .venv/test
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Without a network, or where pip finds no torch for this Python, there is nothing to test: that is no failure.
test-newest: | $(NEWEST)/bin/python
	@if $(MAKE) --silent $(NEWEST)/test >$(NEWEST)/install.log 2>&1; then \
	    $(NEWEST)/bin/python -c 'import torch; print("torch", torch.__version__)' && \
	    $(NEWEST)/bin/python -m pytest -n 2 --dist worksteal; \
	else \
	    echo "test-newest: skipped, the newest torch cannot be installed here; see $(NEWEST)/install.log"; \
	fi

slow: .venv/models
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# As `slow`, these alone: one after another, because each builds the device and starts ranks.
accelerator: .venv/test
	$(BIN)/python -m pytest -m slow tests/accelerator

fuzz: .venv/test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seeds 0:5000 --resume

mutants: .venv/test
	$(BIN)/python -m tests.mutants --save

house: .venv/test
	$(BIN)/python -m tests.readability

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/dev
	$(BIN)/mypy fshard

docs: .venv/dev
	$(BIN)/python -m sphinx --quiet --fail-on-warning -b html docs build/docs

demo: .venv/examples
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/meter.py \
	    $(BIN)/torchrun --standalone --nproc_per_node 2 examples/ddp_parity.py

EXAMPLES := train_gpt ddp_parity find_the_nan check_step mnist fit unequal_tokens finetune_lora finetune_peft \
    finetune_embeddings resnet diffusion dp_sgd maml ensemble hessian custom_transform topk powersgd sibling \
    tensor_parallel four_dimensions diloco rl

examples: .venv/embeddings
	for example in $(EXAMPLES); do \
	    echo "=== $$example"; \
	    OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 examples/$$example.py || exit 1; \
	done

bench: .venv/models
	for configuration in d128-L4-B8-T128-V256 d512-L8-B4-T256 d1024-L8-B1-T128 d64-L48-B1-T16; do \
	    OMP_NUM_THREADS=1 $(BIN)/python benchmarks/peers.py --configuration $$configuration --compiled || exit 1; \
	done
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/peers.py --ranks 1
	for configuration in d1024-L8-B1-T256 llama mixtral; do \
	    $(BIN)/python benchmarks/memory.py --configuration $$configuration || exit 1; \
	done
	$(BIN)/python benchmarks/fit.py
	$(BIN)/python benchmarks/init.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/update.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/leaves.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/agreement.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 benchmarks/compile.py --backends graph,inductor
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 benchmarks/sums.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 benchmarks/axes.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bits.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 benchmarks/checkpoint.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 benchmarks/trace.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/rehearsal.py
	$(BIN)/python benchmarks/recovery.py

clean:
	rm -rf .venv $(NEWEST) .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp records that the extras of its name are installed as pyproject.toml and constraints.txt now say.
.venv/test: EXTRAS := test,examples
.venv/models: EXTRAS := test,examples,models
.venv/embeddings: EXTRAS := embeddings
.venv/dev: EXTRAS := dev
.venv/examples: EXTRAS := examples
.venv/test .venv/models .venv/embeddings .venv/dev .venv/examples: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

# The versions of constraints.txt, but for torch: the newest that pip finds, which `--upgrade` renews.
$(NEWEST)/test: pyproject.toml constraints.txt | $(NEWEST)/bin/python
	grep -v '^torch==' constraints.txt >$(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install -c $(NEWEST)/constraints.txt --upgrade torch -e '.[test,examples]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(NEWEST)/bin/python:
	$(PYTHON) -m venv $(NEWEST)
