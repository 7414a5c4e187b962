"""All sections in order, then a table with what it was run on. `tests/device/run.sh` starts it; exit codes as there."""

from __future__ import annotations

import datetime
import importlib.util
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from device.sections import FAILED, Section, run_all, table

TOTAL_SECONDS = 460.0
"""Eight minutes, less what starting takes."""

SECTIONS = (
    Section("kernels against float64", "device.accuracy", 150),
    Section("time against bytes", "device.bandwidth", 60),
    Section("kernels in CUDA graphs", "device.capture", 40),
    Section("engines of the example pair", "device.engines", 150),
    Section("engines against ONNX Runtime", "device.compare", 60),
    Section("dspark run --compare", "device.generate", 60),
    Section("dspark-verify", "device.verify", 80),
    Section("pytest -m gpu", "device.suite", 150),
)

PACKAGES = ("torch", "cuda-bindings", "nvidia-cuda-nvrtc", "onnxruntime-gpu", "onnxruntime", "tensorrt", "tensorrt-rtx-cu13")


def no_card() -> str:
    """Return why nothing can be run here; an empty string where there is a card."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch, with which results are compared: install a CUDA build of it"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device: this script proves what runs on one, and has run nothing"
    return ""


def described() -> str:
    """Return the card, versions and date of this run."""
    import torch

    card = torch.cuda.get_device_properties(0)
    name = f"{card.name}, compute capability {card.major}.{card.minor}, {card.multi_processor_count} multiprocessors"
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{today}, {name}, {card.total_memory / 1e9:.0f} GB\nPython {platform.python_version()}, CUDA {torch.version.cuda}, {versions}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def main(scratch: Path) -> int:
    """Run everything; return the exit code."""
    reason = no_card()
    if reason:
        print(f"tests/device/run.sh: {reason}", file=sys.stderr)
        return 2
    print(described(), flush=True)
    outcomes = run_all(SECTIONS, scratch, TOTAL_SECONDS)
    print(f"\n{described()}\n{table(outcomes)}")
    return 1 if any(outcome.status == FAILED for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
