"""Section: the tests that are marked `gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from device.product import ROOT, need
from device.sections import Failed, Skipped


def run(scratch: Path) -> str:
    """Run them in one process; tests that skip prove nothing and are counted."""
    need("pytest", "numpy", "onnx", "onnxruntime", "safetensors", "ml_dtypes", "tokenizers")
    report = scratch / "gpu.xml"
    line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    code = subprocess.run(line, cwd=ROOT, check=False).returncode
    passed, skipped = counts(report)
    if code and (passed or skipped):
        raise Failed(f"pytest ended with exit code {code}, see above")
    if not passed:
        raise Skipped(f"no test ran, {skipped} were skipped, see above")
    return f"{passed} pass, {skipped} skip"


def counts(report: Path) -> tuple[int, int]:
    """Return how many tests passed or failed, and how many were skipped."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    skipped = int(suite.attrib["skipped"])
    return int(suite.attrib["tests"]) - skipped, skipped
