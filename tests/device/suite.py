"""Section: the tests that are marked `gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from device.product import ROOT, need
from device.sections import Failed, Skipped

NOTHING_COLLECTED = 5


def run(_: Path) -> str:
    """Run them in one process."""
    need("pytest", "numpy", "onnx", "onnxruntime", "safetensors", "ml_dtypes")
    code = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"], cwd=ROOT, check=False).returncode
    if code == NOTHING_COLLECTED:
        raise Skipped("no test is marked gpu")
    if code:
        raise Failed(f"pytest ended with exit code {code}, see above")
    return "all pass"
