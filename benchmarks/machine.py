"""What a figure was measured on: processor, versions, date."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe(*packages: str) -> str:
    """Return one line to print above a table."""
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    cores = len(os.sched_getaffinity(0))
    return f"{datetime.datetime.now(datetime.UTC).date()}, {cores} cores of {_processor()}, Python {platform.python_version()}, {versions}"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    if "model name" not in values:
        return platform.machine()
    return f"{values['model name']} (family {values.get('cpu family')}, model {values.get('model')})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
