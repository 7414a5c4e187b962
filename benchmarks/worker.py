"""The other side of alternatives/protocol.py: a process in the environment of one alternative, asked one job at a time.

Knows the protocol. Does not know what the jobs or the alternatives are.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALTERNATIVES = Path(__file__).parent / "alternatives"


class Worker:
    """A process in the environment of one alternative; see alternatives/protocol.py."""

    def __init__(self, python: str, script: str, *arguments: object) -> None:
        command = [python, str(ALTERNATIVES / script), *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = self._read()["versions"]

    def run(self, job: Mapping[str, object]) -> dict[str, Any]:
        """Answer a job with its tokens and seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with code {self._process.wait()}: {' '.join(map(str, self._process.args))}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process: its standard input ends, then it is waited for."""
        self._process.communicate()
