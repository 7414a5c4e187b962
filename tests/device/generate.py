"""Section: `dspark run --compare` on the engines: speculative and plain tokens are identical, and what both cost."""

from __future__ import annotations

from pathlib import Path

from device.product import PAIR, bundle, command, flavour


def run(scratch: Path) -> str:
    """Decode recorded prompts both ways on the engines of this card."""
    made, name = bundle(scratch), flavour()
    for kind in ("func", "math"):
        prompts = str(PAIR / "prompts" / f"{kind}.jsonl")
        command("dspark", "run", str(made), "--backend", name, "--prompt-file", prompts, "--limit", "4", "--compare")
    return f"8 prompts on {name}, identical both ways"
