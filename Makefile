# Two commands: `make train` and `make test`. Both make .venv from requirements.txt first.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: train test test-slow faults bench lint clean

train: $(VENV)/ready
	$(RUN) train.py

test: $(VENV)/ready
	$(RUN) -m pytest -n auto

test-slow: $(VENV)/dev
	$(RUN) -m pytest -m slow -n auto

faults: $(VENV)/dev
	$(RUN) -m pytest tests/faults -m "slow or not slow" -n auto

# make bench TEXT=FILE NANOGPT=DIR LLAMA2C="BINARY ..." ONLY="SECTION ...", or some of these
bench: $(VENV)/ready
	$(RUN) benchmarks/all.py $(if $(TEXT),--text "$(TEXT)") $(if $(NANOGPT),--nanogpt "$(NANOGPT)") \
		$(if $(LLAMA2C),--llama2c $(LLAMA2C)) $(if $(ONLY),--only $(ONLY))

lint: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/ready: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -r requirements.txt
	touch $@

$(VENV)/dev: $(VENV)/ready pyproject.toml
	$(RUN) -m pip install --editable .[dev]
	touch $@

clean:
	rm -rf $(VENV)
