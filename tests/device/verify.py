"""Section: `dspark-verify` compares the engines of this card with ONNX Runtime and torch, tensor by tensor and token by token."""

from __future__ import annotations

from pathlib import Path

from device.product import bundle, command, need


def run(scratch: Path) -> str:
    """Verify the bundle that was built for this card."""
    made = bundle(scratch)
    need("polygraphy")
    command("dspark-verify", str(made))
    return "every engine present agrees"
