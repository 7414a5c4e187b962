"""The README's commands, options, targets and links are real."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from dspark.export import cli as export_cli
from dspark.export import verify_cli
from dspark.runtime import cli as runtime_cli

README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return every long option of a parser and its subcommands."""
    names = set()
    for action in parser._actions:
        names |= {name for name in action.option_strings if name.startswith("--")}
        if isinstance(action, argparse._SubParsersAction):
            names |= {name for sub in action.choices.values() for name in options_of(sub)}
    return names


PARSERS = {"dspark-export": export_cli._parser, "dspark-verify": verify_cli._parser, "dspark": runtime_cli._parser}


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        return
    parser = PARSERS[program]()
    parser.parse_args(arguments)
    for argument in arguments:
        assert not argument.startswith("examples/") or (ROOT / argument).exists()


def test_export_options_are_all_described() -> None:
    described = set(re.findall(r"`(--[a-zA-Z-]+)", README)) | set(re.findall(r"(--[a-zA-Z-]+)", README))
    assert options_of(export_cli._parser()) - {"--version", "--help", "--quiet", "--verbose"} <= described


def test_options_in_the_text_exist() -> None:
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    known = {option for parser in PARSERS.values() for option in options_of(parser())} | set(
        re.findall(r'add_argument\(\s*"(--[a-z-]+)"', scripts)
    )
    text = re.sub(r"pip install [^`]*", "", README)
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-zA-Z-]+)", text)) <= known


def test_python_example(pair_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate, draft, own_target = re.findall(r"```python\n(.*?)```", README, re.S)
    (tmp_path / "demo-bundle").symlink_to(pair_bundle)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(generate, "README.md", "exec"), names)
    assert "The final answer is \\boxed{" in (shown := capsys.readouterr().out)
    assert " stop\n" in shown
    exec(compile(draft, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[[")
    pytest.importorskip("transformers", reason="the example of a Hugging Face target needs transformers")
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(compile(own_target, "README.md", "exec"), names)


def test_links_resolve() -> None:
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/pair/README.md"):
        text = (ROOT / name).read_text()
        for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", text):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name}: {link}"


def test_modules_named_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in set(re.findall(r"`((?:export|runtime|plugins|tests)/[\w/.]+)`", text)):
        assert (ROOT / path).exists(), path
    named = set(re.findall(r"`(?:\w+/)?(\w+\.py)`", text))
    for folder in ("export", "runtime"):
        unnamed = {p.name for p in (ROOT / folder).glob("*.py")} - named - {"__init__.py", "cli.py", "errors.py", "terminal.py"}
        assert not unnamed, f"{folder}: {unnamed} are not in ARCHITECTURE.md"


def test_no_placeholder_is_left() -> None:
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        assert not re.findall(r"@[A-Z]+@", (ROOT / name).read_text())
