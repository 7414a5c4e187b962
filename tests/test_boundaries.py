"""Imports go one way: export -> runtime -> plugins, and heavy packages are imported where they are used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

HEAVY = {"torch", "onnx", "onnxscript", "onnx_ir", "polygraphy", "safetensors", "ml_dtypes", "transformers"}
BACKENDS = {"onnxruntime", "tensorrt", "tensorrt_rtx", "cuda", "tokenizers", "jinja2"}
MODULES = sorted(path for folder in ("export", "runtime", "plugins") for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path, *, top_level: bool) -> Iterator[str]:
    """Yield the full name of every module that a file imports, anywhere or at its top level only."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    names = set(imports(path, top_level=False))
    roots = {name.split(".")[0] for name in names}
    assert not roots & {"export", "runtime", "plugins"}, "the bare folder name makes a second copy of every class"
    ours = {name.split(".")[1] for name in names if name.startswith("dspark.")}
    assert ours <= {"export": {"export", "runtime", "plugins"}, "runtime": {"runtime", "plugins"}, "plugins": {"plugins"}}[folder]
    if folder != "export":
        assert not roots & HEAVY
        assert not {name.split(".")[0] for name in imports(path, top_level=True)} & BACKENDS
    if path.name == "contract.py":
        assert roots <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "module", ["dspark.runtime", "dspark.plugins.contract", "dspark.runtime.cli", "dspark.export.cli", "dspark.export.verify_cli"]
)
def test_importing_pulls_nothing_heavy(module: str) -> None:
    """In a process of its own: neither torch nor an engine is loaded by importing the public modules."""
    code = f"import sys, {module}; print(*sorted({{n.split('.')[0] for n in sys.modules}} & {HEAVY | BACKENDS!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_the_commands_start_with_the_standard_library() -> None:
    """What loads before Ctrl-C is caught is little: no numpy, no engine."""
    code = "import sys, dspark.runtime.cli, dspark.export.cli, dspark.export.verify_cli; print('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_runtime_generates_without_the_export_extra(pair_bundle: Path, tmp_path: Path) -> None:
    """Every package of the export extra is made unimportable, and the bundle still decodes."""
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is blocked')")
    code = "import sys; from dspark.runtime import LLM, SamplingParams\n"
    code += "print(LLM(sys.argv[1]).generate([[5, 6, 7]], SamplingParams(max_tokens=5))[0].token_ids)"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    command = [sys.executable, "-c", code, str(pair_bundle)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert len(ast.literal_eval(result.stdout)) == 5


def test_one_copy_of_every_class() -> None:
    assert importlib.import_module("dspark.runtime.errors").DSparkError is importlib.import_module("dspark.runtime").errors.DSparkError
