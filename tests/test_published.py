"""The recipe of docs/published-8b.md as far as it can be checked without the models: options, extras, sizes, scripts."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from dspark.plugins import kernels

TEXT = (ROOT / "docs" / "published-8b.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
SCRIPTS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
OTHERS = {"pip", "hf", "curl"}
"""Programs that are not ours."""


def test_it_says_first_that_it_was_not_run() -> None:
    assert TEXT.split("\n\n")[1].startswith("**Nothing in this document has been run.**")


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    """Every option is one of the program's, with a value that it takes."""
    program, *arguments = shlex.split(command.partition(" > ")[0])
    if program in OTHERS:
        missing = {name for part in re.findall(r"dspark\[(.*?)\]", command) for name in part.split(",")} - PROJECT[
            "optional-dependencies"
        ].keys()
        assert not missing
        return
    if program.startswith("tests/"):
        assert (ROOT / program).exists() and not arguments
        return
    module = importlib.import_module(PROJECT["scripts"][program].partition(":")[0])
    module._parser().parse_args(arguments)


def test_every_program_appears() -> None:
    assert {shlex.split(command)[0] for command in COMMANDS} == {*OTHERS, "dspark-export", "dspark", "dspark-verify", "tests/device/run.sh"}


def test_sizes() -> None:
    """From the sizes of both models: hidden 4096, 36 and 5 layers, 32 and 8 heads of 128, 12288 wide, 151936 tokens, rank 256, 5 taps."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 128 + 2 * 4096
    tables, norm = 2 * 151936 * 4096, 4096
    target = tables + 36 * layer + norm
    drafter = tables + 5 * layer + 5 * 4096 * 4096 + 2 * norm + 2 * 151936 * 256 + (4096 + 256 + 1)
    assert f"{target:,} and {drafter:,} parameters" in TEXT
    assert f"{2 * (target + drafter) / 1e9:.1f} GB" in TEXT and f"| {2 * target / 1e9:.1f} GB |" in TEXT
    assert f"| {2 * drafter / 1e9:.1f} GB each |" in TEXT
    token = 36 * 2 * 8 * 128 * 2
    assert f"{token:,} a token, {4096 * token / 1e9:.1f} GB at 4096" in TEXT
    assert f"{5 * 2 * 2064 * 8 * 128 * 2 / 1e6:.0f} MB" in TEXT
    assert f"{4 * (target + drafter) / 1e9:.0f} GB of host memory" in TEXT
    assert f"{2 * target / 433e6 * 2.8:.0f} GB" in TEXT
    assert 128 in kernels.HEAD_DIMS


def test_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Three questions in the form of the data set: prompts that `dspark run` takes, and scores."""
    monkeypatch.chdir(tmp_path)
    answers = ["He has 3*4=<<3*4=12>>12.\n#### 12", "So $1,234.\n#### 1,234", "#### -5"]
    questions = "".join(json.dumps({"question": f"Q{i}?", "answer": text}) + "\n" for i, text in enumerate(answers))
    Path("gsm8k-test.jsonl").write_text(questions)
    prompts, score = SCRIPTS
    exec(compile(prompts, "published-8b.md", "exec"), {})
    from dspark.runtime import cli

    args = cli._parser().parse_args(["run", "bundle", "--prompt-file", "gsm8k.jsonl"])
    assert [message["content"] for (message,) in cli._prompts(args)] == [
        f"Q{i}?\nPlease reason step by step, and put your final answer within \\boxed{{}}." for i in range(3)
    ]
    given = {
        "answers.jsonl": ["3 + 9 = \\boxed{12}", "\\boxed{1234.0} dollars, of 7", "\\boxed{5}"],
        "plain.jsonl": ["12", "no idea", "-5"],
    }
    for name, texts in given.items():
        Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    exec(compile(score, "published-8b.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["answers.jsonl: 66.67% of 3 right", "plain.jsonl: 66.67% of 3 right"]
