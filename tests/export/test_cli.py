"""`dspark-export` as a command: messages, exit codes, JSON, verification."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN

from dspark.export import bundle, cli, verify
from dspark.runtime.cli import main as inspect

PAIR = [str(GOLDEN / "small_vocab" / "target"), str(GOLDEN / "small_vocab" / "drafter")]


def test_json_summary_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main([*PAIR, str(tmp_path / "out"), "--json", "--verify"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["manifest"]["dtype"] == "fp32"
    rows = {row["name"]: row for row in summary["verify"]}
    assert {
        "prefill logits",
        "drafted tokens",
        "confidence logits",
        "verify taps",
        "ring rows",
        "cache rows",
        "accepted",
    } <= rows.keys()
    assert all(row["passed"] and row["difference"] <= row["tolerance"] for row in rows.values())
    assert rows["verify logits"]["difference"] > 0
    # The same pair with a tolerance that nothing meets: the exit code says so, and the bundle stays.
    monkeypatch.setitem(verify._TOLERANCE, "fp32", 1e-12)
    assert cli.main([*PAIR, str(tmp_path / "out"), "--overwrite", "--verify"]) == 1
    assert "FAIL verify logits" in capsys.readouterr().out
    assert (tmp_path / "out" / "manifest.json").exists()


def test_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line to `dspark inspect`: what is quantised, how, and verified both ways."""
    output = str(tmp_path / "out")
    options = ["--weights", "int4", "--drafter-weights", "int8", "--group-size", "16"]
    assert cli.main([*PAIR, output, *options, "--json", "--verify"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["manifest"]["quantization"] == {"group_size": 16, "target_bits": 4, "drafter_bits": 8, "markov_bits": 8}
    assert {row["name"] for row in summary["verify"]} >= {"verify logits", "verify logits, rounded"}
    assert inspect(["inspect", output]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "quantised target int4, drafter int8, Markov output int8; a scale for 16 weights of a row" in shown
    assert "runs on ONNX Runtime; the CPU is the default" in shown


def test_verify_sees_another_checkpoint(tmp_path: Path) -> None:
    """The comparison can fail: a bundle against the weights of another pair of its shape."""
    bundle = tmp_path / "out"
    pair = [str(GOLDEN / "vanilla" / model) for model in ("target", "drafter")]
    assert cli.main([*pair, str(bundle), "-q", "--ctx-window", "full", "--debug-outputs"]) == 0
    report = verify.verify_bundle(bundle, GOLDEN / "vanilla" / "target", GOLDEN / "vanilla" / "drafter")
    assert all(row.passed for row in report)
    swapped = verify.verify_bundle(bundle, GOLDEN / "rnn" / "target", GOLDEN / "vanilla" / "drafter")
    assert not all(row.passed for row in swapped)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PAIR, "OUT", "--group-size", "32"], "group_size is about quantised weights: choose weights int8 or int4"),
        (["/nowhere", "/nowhere", "OUT"], "/nowhere/config.json does not exist"),
        ([*PAIR, "OUT", "--ctx-window", "3"], "the minimum is 9"),
        ([*PAIR, "OUT", "--num-speculative-tokens", "8"], "expected 1..7"),
        ([*PAIR, "OUT", "--mask-token-id", "999"], "mask_token_id 999 is outside the embedding's 9 rows"),
        ([*PAIR, "OUT", "--dtype", "bf16", "--verify"], "--verify runs on the CPU"),
        ([PAIR[1], PAIR[0], "OUT"], "the target must be a dense Qwen3 (are target and drafter swapped?)"),
        ([PAIR[0], PAIR[0], "OUT"], "expected one of Qwen3DSparkModel, DSparkDraftModel (this is a target"),
        ([*PAIR, "/proc/dspark"], "/proc/dspark cannot be written"),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "out") if a == "OUT" else a for a in arguments]
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main([*PAIR, str(tmp_path / "file" / "out")]) == 2
    assert "file is no directory: choose another output" in capsys.readouterr().err


def test_help_and_bad_arguments_need_no_torch(tmp_path: Path) -> None:
    """The help comes at once, without the export extra."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "dspark.export.cli", "--help"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    assert "--ctx-window W|full" in result.stdout
    result = subprocess.run(
        [sys.executable, "-m", "dspark.export.cli", *PAIR, "out"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert 'pip install "dspark[export]"' in result.stderr


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong, what to do, and nothing left behind."""

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundle, "record_files", full)
    pair = [str(GOLDEN / "vanilla" / model) for model in ("target", "drafter")]
    assert cli.main([*pair, str(tmp_path / "out"), "--ctx-window", "full", "--debug-outputs"]) == 2
    assert "No space left on device: choose an output with more room; no unfinished files are left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
