"""Sections of a device run: each in a process of its own with a time limit, so that none can stop the others.

A section is a module with `run(scratch) -> str`, which prints what it finds, returns a summary, and raises `Failed` or `Skipped`.
Knows processes and outcomes; not what sections do. A fault of the device poisons its process, not the next section's.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


class Failed(Exception):
    """What a section was to prove does not hold; the message is its summary."""


class Skipped(Exception):
    """A section's needs are absent; the message names them."""


@dataclass(frozen=True)
class Section:
    """One section: what it proves in a few words, its module, and the most seconds it may take."""

    name: str
    module: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a section ended."""

    section: Section
    status: str
    summary: str
    seconds: float


def run_all(sections: Sequence[Section], scratch: Path, total_seconds: float) -> list[Outcome]:
    """Run sections in order; those for which no time is left are counted as failed."""
    end = time.monotonic() + total_seconds
    outcomes = []
    for section in sections:
        print(f"\n== {section.name}", flush=True)
        outcomes.append(_run(section, scratch, min(section.seconds, end - time.monotonic())))
        print(f"-- {outcomes[-1].status}: {outcomes[-1].summary}", flush=True)
    return outcomes


def _run(section: Section, scratch: Path, limit: float) -> Outcome:
    if limit <= 0:
        return Outcome(section, FAILED, "no time was left for it", 0.0)
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    began = time.monotonic()
    # A session of its own: at the limit, what the section has started ends with it.
    command = [sys.executable, "-m", __spec__.name, section.module, str(scratch), str(result)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return Outcome(section, FAILED, f"took longer than {limit:.0f} s", limit)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    status, summary = json.loads(result.read_text()) if result.exists() else (FAILED, f"ended with exit code {code}, see above")
    return Outcome(section, status, summary, time.monotonic() - began)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the last table: a line a section, then the counts."""
    width = max(len(outcome.section.name) for outcome in outcomes)
    lines = [f"{o.status:<8}{o.section.name:<{width}}  {o.seconds:5.0f} s  {o.summary}" for o in outcomes]
    counts = [f"{sum(o.status == status for o in outcomes)} {status}" for status in (PASSED, FAILED, SKIPPED)]
    return "\n".join([*lines, ", ".join(counts)])


def _main(module: str, scratch: Path, result: Path) -> None:
    # The classes that a section raises are those of the imported module, not of this one run as a script.
    ours = importlib.import_module(__spec__.name)
    try:
        outcome = PASSED, importlib.import_module(module).run(scratch)
    except ours.Failed as failure:
        outcome = FAILED, str(failure)
    except ours.Skipped as reason:
        outcome = SKIPPED, str(reason)
    result.write_text(json.dumps(outcome))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
