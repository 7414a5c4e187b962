"""Section: `dspark run --compare` on the engines: speculative and plain tokens are identical, and what both cost."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from device.product import PAIR, bundle, command, flavour
from device.sections import Skipped


def run(scratch: Path) -> str:
    """Decode recorded prompts both ways on the engines of this card."""
    made, name = bundle(scratch), flavour()
    if not accepted(name):
        raise Skipped(f"this checkout's dspark run has no --backend {name}")
    for kind in ("func", "math"):
        prompts = str(PAIR / "prompts" / f"{kind}.jsonl")
        command("dspark", "run", str(made), "--backend", name, "--prompt-file", prompts, "--limit", "4", "--compare")
    return f"8 prompts on {name}, identical both ways"


def accepted(backend: str) -> bool:
    """Whether `dspark run` takes a backend of this name."""
    from dspark.runtime import cli

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            cli._parser().parse_args(["run", "bundle", "--backend", backend])
        except SystemExit:
            return False
    return True
