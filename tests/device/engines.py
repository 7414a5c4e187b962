"""Section: `dspark-export --backend` builds the engines of the example pair for this card."""

from __future__ import annotations

from pathlib import Path

import torch
from device.product import BUNDLE, PAIR, command, flavour, need
from device.sections import Skipped


def run(scratch: Path) -> str:
    """Export and build; the bundle stays in `scratch` for the sections that follow."""
    need("numpy", "onnx", "onnxscript", "onnx_ir", "safetensors", "ml_dtypes", "onnxruntime", "cuda.bindings")
    name = flavour()
    major, minor = torch.cuda.get_device_capability()
    if name == "tensorrt-rtx":
        from dspark.runtime.flavour import load_module

        if f"SM{major}{minor}" not in load_module(name).ComputeCapability.__members__:
            raise Skipped(f"TensorRT-RTX builds nothing for compute capability {major}.{minor}")
    # float32, which ONNX Runtime's CPU provider computes in, too; with the logits of proposals, which decide near ties.
    arguments = ["--backend", name, "--compute-capability", f"{major}.{minor}", "--dtype", "fp32", "--debug-outputs"]
    pair = [str(PAIR / "target"), str(PAIR / "drafter"), str(scratch / BUNDLE)]
    command("dspark-export", *pair, *arguments, "--max-batch-size", "4", "--verbose")
    (engines,) = (scratch / BUNDLE / "engines").iterdir()
    size = sum(path.stat().st_size for path in engines.iterdir())
    return f"{engines.name}, {len(list(engines.iterdir()))} graphs, {size / 1e6:.0f} MB"
