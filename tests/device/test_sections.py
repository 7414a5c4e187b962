"""The runner of a device run: what a section does cannot stop the others, and a machine without a card is told so."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from device import everything, product, sections, suite
from device.sections import FAILED, PASSED, SKIPPED, Section, run_all, table

BODIES = {
    "good": "return str(scratch.is_dir())",
    "bad": "raise Failed('7 of 9 differ')",
    "absent": "raise Skipped('needs something')",
    "broken": "return 1 / 0",
    "dead": "import os; os._exit(139)",
    "stuck": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', f'below-{scratch}'])",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in BODIES.items():
        text = f"from device.sections import Failed, Skipped\n\ndef run(scratch):\n    print('in {name}')\n    {body}\n"
        (tmp_path / f"section_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "tests")]))


def runs(argument: str) -> bool:
    """Whether a process was started with an argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            if argument in path.read_text():
                return True
    return False


@pytest.mark.usefixtures("modules")
def test_no_section_stops_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = [
        Section(name, f"section_{name}", 2 if name == "stuck" else 20) for name in ("bad", "absent", "broken", "dead", "stuck", "good")
    ]
    began = time.monotonic()
    outcomes = run_all(asked, tmp_path, 60)
    assert time.monotonic() - began < 30
    assert [outcome.status for outcome in outcomes] == [FAILED, SKIPPED, FAILED, FAILED, FAILED, PASSED]
    summaries = [outcome.summary for outcome in outcomes]
    assert summaries[:2] == ["7 of 9 differ", "needs something"]
    assert summaries[2] == "ended with exit code 1, see above"
    assert summaries[3] == "ended with exit code 139, see above"
    assert summaries[4:] == ["took longer than 2 s", "True"]
    captured = capfd.readouterr()
    assert "ZeroDivisionError" in captured.err
    assert "in good" in captured.out
    # What the stuck section had started is gone, too.
    assert not runs(f"below-{tmp_path}")


@pytest.mark.usefixtures("modules")
def test_the_whole_has_a_limit(tmp_path: Path) -> None:
    outcomes = run_all([Section("stuck", "section_stuck", 20), Section("good", "section_good", 20)], tmp_path, 1.0)
    assert [outcome.summary for outcome in outcomes] == ["took longer than 1 s", "no time was left for it"]


def test_table() -> None:
    parts = [("kernels", PASSED, "all"), ("graphs of it", FAILED, "differ"), ("engines", SKIPPED, "needs tensorrt, not installed")]
    outcomes = [sections.Outcome(Section(name, "", 1), status, summary, 3.2) for name, status, summary in parts]
    assert table(outcomes).splitlines() == [
        "passed  kernels           3 s  all",
        "FAILED  graphs of it      3 s  differ",
        "skipped engines           3 s  needs tensorrt, not installed",
        "1 passed, 1 FAILED, 1 skipped",
    ]


def test_everything_ends_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(everything, "no_card", lambda: "")
    monkeypatch.setattr(everything, "described", lambda: "a card")
    for statuses, code in (((PASSED, SKIPPED), 0), ((FAILED, PASSED), 1)):
        outcomes = [sections.Outcome(section, status, "", 1.0) for section, status in zip(everything.SECTIONS, statuses, strict=False)]
        monkeypatch.setattr(everything, "run_all", lambda *_, outcomes=outcomes: outcomes)
        assert everything.main(tmp_path) == code
        assert capsys.readouterr().out.endswith(f"\na card\n{table(outcomes)}\n")


def test_sections_exist_and_fit_the_time() -> None:
    assert everything.TOTAL_SECONDS <= 470
    assert sum(section.seconds for section in everything.SECTIONS[:3]) <= 250  # those that need nothing but torch
    for section in everything.SECTIONS:
        assert (ROOT / "tests" / f"{section.module.replace('.', '/')}.py").exists()


def test_needs_are_named() -> None:
    with pytest.raises(sections.Skipped, match=r"needs no_such_module, no_such.submodule, not installed"):
        product.need("json", "no_such_module", "no_such.submodule")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def test_a(): pass\ndef test_b(): pytest.skip('absent')", "1 pass, 1 skip"),
        ("def test_b(): pytest.skip('absent')", "no test ran, 1 were skipped"),
        ("def test_a(): pass\ndef test_b(): assert 0", "exit code 1"),
        ("", "no test ran, 0 were skipped"),
    ],
)
def test_the_marked_tests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: str) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    try:
        said = suite.run(tmp_path)
    except (sections.Skipped, sections.Failed) as outcome:
        said = str(outcome)
        assert isinstance(outcome, sections.Failed) == ("exit" in expected)
    assert expected in said


def test_without_a_card_the_script_says_so() -> None:
    """From a plain checkout: nothing of dspark is installed for this Python, its own packages are."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    environment = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    result = subprocess.run([ROOT / "tests" / "device" / "run.sh"], capture_output=True, text=True, env=environment, cwd="/", check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("tests/device/run.sh: torch ")
    assert "finds no CUDA device" in result.stderr
    assert result.stdout == ""


def test_commands_run_from_a_plain_checkout(tmp_path: Path) -> None:
    """The packages that the script lays out are importable, and the commands find their version."""
    script = (ROOT / "tests" / "device" / "run.sh").read_text()
    probe = 'python3 -S -c "import sys; from dspark.runtime.cli import main; main(sys.argv[1:])" --version'
    changed = tmp_path / "tests" / "device" / "run.sh"
    changed.parent.mkdir(parents=True)
    changed.write_text(script.replace('python3 -m device.everything "$scratch"', probe))
    for name in ("export", "runtime", "plugins", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    result = subprocess.run(["bash", changed], capture_output=True, text=True, env=environment, check=False)
    assert result.stdout == "dspark 0.1.0\n", result.stderr
