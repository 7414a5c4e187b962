"""What the sections about the whole product share: which TensorRT there is, the commands of this checkout, the bundle with engines.

Knows what may be absent, and says so. Does not know what a section proves.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from device.sections import Failed, Skipped

ROOT = Path(__file__).parent.parent.parent
PAIR = ROOT / "examples" / "pair"
BUNDLE = "bundle"


def need(*modules: str) -> None:
    """Raise Skipped with the modules that are not installed."""
    missing = [name for name in modules if not _installed(name)]
    if missing:
        raise Skipped(f"needs {', '.join(missing)}, not installed")


def _installed(name: str) -> bool:
    parent = name.rpartition(".")[0]
    return (not parent or _installed(parent)) and importlib.util.find_spec(name) is not None


def flavour() -> str:
    """Return the TensorRT that is installed, `tensorrt` before `tensorrt-rtx`. Raises Skipped."""
    from dspark.runtime.engines import FLAVOURS

    for name, module in FLAVOURS.items():
        if _installed(module):
            return name
    raise Skipped(f"needs one of the modules {', '.join(FLAVOURS.values())}, not installed")


def bundle(scratch: Path) -> Path:
    """Return the bundle with engines that an earlier section left. Raises Skipped."""
    if not (scratch / BUNDLE).exists():
        raise Skipped("no engines were built, see above")
    return scratch / BUNDLE


def command(name: str, *arguments: str) -> None:
    """Run a command that pyproject.toml declares. Raises Failed where it fails."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[name].partition(":")
    execute([sys.executable, "-c", f"import sys; from {module} import {function} as main; sys.exit(main())", *arguments], name)


def execute(line: Sequence[str], name: str) -> None:
    """Run a program in the checkout. Raises Failed with its exit code."""
    code = subprocess.run(line, cwd=ROOT, check=False).returncode
    if code:
        raise Failed(f"{name} ended with exit code {code}, see above")
