# make demo: environment, install, export of the example pair, generation with a comparison. make test: the default tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PROMPTS = examples/pair/prompts

.PHONY: demo test slow lint bench clean

demo: $(VENV)/installed
	$(BIN)/dspark-export examples/pair/target examples/pair/drafter demo-bundle --overwrite
	$(BIN)/dspark inspect demo-bundle
	$(BIN)/dspark run demo-bundle --prompt-file $(PROMPTS)/func.jsonl --limit 1
	$(BIN)/dspark run demo-bundle --prompt-file $(PROMPTS)/math.jsonl --compare

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

# mypy does not see editable installs of mapped folders: it reads a plain copy.
lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types
	$(BIN)/pip install --quiet --no-deps --target build/types .
	MYPYPATH=build/types $(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/dspark-export examples/pair/target examples/pair/drafter demo-bundle --overwrite --quiet
	$(BIN)/python benchmarks/pair.py demo-bundle
	$(BIN)/python benchmarks/export_shapes.py 4b 8b 14b

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[export,dev]"
	touch $@

clean:
	rm -rf $(VENV) build demo-bundle *.egg-info
