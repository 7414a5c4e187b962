"""The comparison script: what it computes from outputs and times, and a whole run with workers of their own."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from compare import EXAMPLE_TARGET, Alternative, agreement, end_tokens, main, measure, ratios, read_jobs, table
from worker import ALTERNATIVES, Worker

from dspark.runtime import LLM
from dspark.runtime.drafter import Drafter


class FakeWorker:
    """Emits the job's ids, `late` of them wrong, at a speed of its own."""

    def __init__(self, seconds: list[float], asked: list[str], late: int = 0) -> None:
        self._seconds, self._asked, self._late = seconds, asked, late

    def run(self, job: dict[str, object]) -> dict[str, object]:
        """Answer a job."""
        self._asked.append(str(job["way"]))
        ids = list(job["ids"])  # type: ignore[call-overload]
        return {"tokens": ids[: len(ids) - self._late] + [0] * self._late, "seconds": self._seconds.pop(0)}


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert agreement([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == (2, 1.0)
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == (1, 3 / 6), "what follows a difference does not count"
    assert agreement([[1, 2]], [[1, 2, 3]]) == (0, 2 / 3), "a longer output is no equal one"


def test_ratios_are_medians_of_ratios() -> None:
    """A machine that slows down for both in one repeat leaves the ratio alone; a median of speeds would not."""
    ours = Alternative("ours", None, "", {"math": [100.0, 10.0, 60.0]})  # type: ignore[arg-type]
    theirs = Alternative("theirs", None, "", {"math": [50.0, 5.0, 20.0]})  # type: ignore[arg-type]
    assert ratios(ours, theirs) == {"math": 2.0}


def test_runs_are_interleaved_and_summed() -> None:
    """Whoever begins changes; the first run of each is not counted; speeds are sums of tokens by sums of seconds."""
    asked: list[str] = []
    a = Alternative("a", FakeWorker([9.0, 1.0, 3.0, 2.0, 2.0], asked), "A")  # type: ignore[arg-type]
    b = Alternative("b", FakeWorker([9.0, 8.0, 8.0, 4.0, 4.0], asked, late=1), "B")  # type: ignore[arg-type]
    measure([a, b], {"math": [{"ids": [1, 2]}, {"ids": [3, 4]}]}, repeats=2)
    assert asked == ["A", "B", "A", "B", "B", "A", "B", "A", "A", "B"]
    assert a.speeds == {"math": [4 / 4, 4 / 4]}
    assert b.speeds == {"math": [4 / 16, 4 / 8]}
    assert table([a, b]).splitlines() == [
        "| tokens per second | math |",
        "|---|---:|",
        "| a | 1 |",
        "| b | 0 |",
        "",
        "| a, times | math | equal outputs | equal tokens |",
        "|---|---:|---:|---:|",
        "| b | 3.00 | 0 of 2 | 50.0% |",
    ]


def test_jobs() -> None:
    assert end_tokens(EXAMPLE_TARGET) == [2037, 2035]
    jobs = read_jobs(["json", "prose"], 3, 11, [7])
    assert [len(group) for group in jobs.values()] == [3, 3]
    assert all((job["max_tokens"], job["stop_ids"]) == (11, [7]) for group in jobs.values() for job in group)


def test_commands_are_those_of_the_header(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--commands"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "python -m venv env-transformers"
    assert lines[-1].startswith("python benchmarks/compare.py bundle-fp32 ")


def test_whole_run_with_transformers(pair_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every way of transformers emits what dspark does; the workers are processes, here of the same environment."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    size = ["--kinds", "json", "--prompts", "1", "--max-tokens", "8", "--repeats", "1"]
    main([str(pair_bundle), "--transformers", sys.executable, *size])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("|")]
    equal = [line for line in rows if line.endswith("| 1 of 1 | 100.0% |")]
    assert [line.split("|")[1].split(",")[0].strip() for line in equal] == ["ONNX Runtime", *["transformers fp32"] * 3]


def test_plain_is_plain(pair_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways emit the same tokens, so that no output tells them apart: the drafter's calls do."""
    monkeypatch.syspath_prepend(str(ALTERNATIVES))
    ways = importlib.import_module("bundle").ways(LLM(pair_bundle))
    proposals: list[object] = []
    propose = Drafter.propose
    monkeypatch.setattr(Drafter, "propose", lambda self, *args, **kwargs: proposals.append(self) or propose(self, *args, **kwargs))
    ways["plain"]([5, 6, 7], 6, [])
    assert not proposals
    ways["speculative"]([5, 6, 7], 6, [])
    assert proposals


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"a worker ended with code 1: .*bundle\.py"):
        main([str(tmp_path), "--kinds", "json", "--prompts", "1"])


def test_the_protocol_keeps_prints_of_libraries_apart(tmp_path: Path) -> None:
    """A way that prints does not break the answers, and stop ids and lengths reach it."""
    script = tmp_path / "noisy.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ALTERNATIVES)!r})\n"
        "from protocol import serve\n"
        "def way(ids, most, stops):\n    print('{noise')\n    return [len(ids), most, *stops]\n"
        "serve({'w': way}, ['numpy'])\n"
    )
    worker = Worker(sys.executable, str(script))
    answer = worker.run({"way": "w", "ids": [1, 2], "max_tokens": 5, "stop_ids": [9]})
    worker.close()
    assert json.dumps(answer["tokens"]) == "[2, 5, 9]"
    assert answer["seconds"] >= 0
