"""`dspark run` and `dspark inspect` as commands."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import GOLDEN, PAIR, Export

from dspark.runtime import LLM
from dspark.runtime.cli import main

QUESTION = "Sara is 29 years old. Josh is 11 years younger than Sara. What is the sum of their ages?"


def test_prompts(pair_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text as a message or raw, a text file, ids: the same request in four ways, streamed and as JSON."""
    llm = LLM(pair_bundle)
    chat = llm.generate([[{"role": "user", "content": QUESTION}]])[0]
    (tmp_path / "prompt.txt").write_text(QUESTION)
    ids = ",".join(str(token) for token in chat.prompt_token_ids)
    for arguments in (["--prompt", QUESTION], ["--prompt-file", str(tmp_path / "prompt.txt")], ["--prompt-ids", ids]):
        assert main(["run", str(pair_bundle), *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.out == chat.text + "\n"
        assert "mean accepted length" in captured.err
        assert main(["run", str(pair_bundle), *arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == chat.token_ids
    assert main(["run", str(pair_bundle), "--prompt", QUESTION, "--raw", "--json", "--max-tokens", "7"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert raw["token_ids"] == llm.generate(QUESTION)[0].token_ids[:7]
    assert raw["finish_reason"] == "length"


def test_compare(pair_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt-file", str(PAIR / "prompts" / "json.jsonl"), "--limit", "3", "--max-tokens", "40"]
    assert main(["run", str(pair_bundle), *prompts, "--compare"]) == 0
    text = capsys.readouterr().out
    for word in ("outputs identical", "speculative", "plain", "ratio", "accepted length", "accepted at 1..7"):
        assert word in text
    assert main(["run", str(pair_bundle), *prompts, "--compare", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["identical"] is True
    assert len(summary["results"]) == 3
    assert len(summary["acceptance_per_position"]) == 7


def test_bench(pair_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways of decoding, their stages, and the same as JSON; the stages of a round add up to what it took."""
    arguments = [
        "bench",
        str(pair_bundle),
        "--prompt-file",
        str(PAIR / "prompts" / "func.jsonl"),
        "--limit",
        "2",
        "--max-tokens",
        "24",
        "--repeats",
        "1",
    ]
    assert main([*arguments, "--profile"]) == 0
    printed = capsys.readouterr().out
    for part in ("speculative ", "plain ", "ratio ", "accepted ", "speculative round: ", "plain round: ", "tokenizer ", "█"):
        assert part in printed
    assert main([*arguments, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["mean_accepted_length"] > 2
    stages = numbers["stages_ms"]
    assert stages["plain"]["draft"] == 0 < stages["speculative"]["draft"]
    assert set(stages["plain"]) == {"draft", "verify", "accept", "choose", "host", "tokenizer"}
    assert all(spent >= 0 for way in stages.values() for spent in way.values())
    assert main(["bench", str(pair_bundle)]) == 2
    assert "bench needs prompts of the kind that will be served" in capsys.readouterr().err


def test_compare_says_when_outputs_differ(pair_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def unfaithful(self: LLM, *arguments: object, speculative: bool, **options: object) -> object:
        outputs = generate(self, *arguments, speculative=speculative, **options)
        if speculative:
            outputs[0].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(LLM, "generate", unfaithful)
    assert main(["run", str(pair_bundle), "--prompt", QUESTION, "--compare"]) == 1
    assert "outputs DIFFER" in capsys.readouterr().out


def test_chat_keeps_the_history(pair_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines, seen, encode = iter([QUESTION, "And now?", "word " * 2000, QUESTION, ""]), [], LLM.encode
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    monkeypatch.setattr(LLM, "encode", lambda self, prompt, kwargs=None: seen.append(prompt) or encode(self, prompt, kwargs))
    assert main(["run", str(pair_bundle), "--max-tokens", "20"]) == 0
    assert [[message["role"] for message in messages] for messages in (seen[1], seen[3])] == [["user", "assistant", "user"], ["user"]]
    captured = capsys.readouterr()
    assert seen[1][1]["content"] in captured.out
    assert "max_seq_len is 1024 with at least one for the output; the history is cleared" in captured.err, "the chat goes on"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-ids", "1,x"], "expected token ids like 1,2,3"),
        (["--prompt-ids", "99999"], "outside the vocabulary"),
        (["--prompt-file", "/nowhere.txt"], "/nowhere.txt cannot be read: No such file"),
        (["--prompt-ids", "1", "--limit", "2"], "--limit is for a .jsonl file"),
        (["--json"], "--json needs a prompt"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "x", "--num-speculative-tokens", "9"], "serves 1..7"),
        (["--compare"], "--compare needs a prompt"),
        (["--compare", "--no-speculative", "--prompt", "x"], "leave out --no-speculative"),
        (["--compare", "--temperature", "1", "--prompt", "x"], "leave out --temperature"),
        (["--prompt", "x", "--top-p", "2"], "top_p is 2.0"),
        (["--prompt", "x", "--max-num-seqs", "0"], "max_num_seqs is 0"),
    ],
)
def test_refusals(pair_bundle: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(pair_bundle), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bad_prompt_lines_are_named(pair_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = '{"text": "a\u2028b"}'  # JSON allows the separator, and it is no end of a line
    (tmp_path / "p.jsonl").write_text(good + "\n")
    assert main(["run", str(pair_bundle), "--prompt-file", str(tmp_path / "p.jsonl"), "--max-tokens", "2"]) == 0
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert main(["run", str(pair_bundle), "--prompt-file", str(tmp_path / "latin.txt")]) == 2
    assert "latin.txt is not UTF-8 text" in capsys.readouterr().err
    for text in ("not json", '{"other": 1}', "[1, 2]"):
        (tmp_path / "p.jsonl").write_text('{"ids": [1]}\n' + text)
        assert main(["run", str(pair_bundle), "--prompt-file", str(tmp_path / "p.jsonl")]) == 2
        assert "p.jsonl, line 2: expected a JSON object" in capsys.readouterr().err


def test_no_tokenizer(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(export(GOLDEN / "vanilla", ctx_window="full", debug_outputs=True))
    assert main(["run", bundle, "--prompt-ids", "1,2,3", "--max-tokens", "3", "--ignore-eos"]) == 0
    assert len(capsys.readouterr().out.split()) == 3
    assert main(["run", bundle]) == 2
    assert "pass --prompt-ids" in capsys.readouterr().err


def test_inspect(pair_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(pair_bundle), "--hash"]) == 0
    captured = capsys.readouterr()
    for word in ("fp32", "block 7", "taps [1, 4, 6]", "vanilla Markov head of rank 64", "1024 tokens", "mask token 2040"):
        assert word in captured.out
    assert "recorded sha256" in captured.err
    assert main(["inspect", str(pair_bundle), "--json"]) == 0
    assert capsys.readouterr().out == (pair_bundle / "manifest.json").read_text()
    damaged = tmp_path / "damaged"
    shutil.copytree(pair_bundle, damaged)
    (damaged / "draft.onnx").write_bytes(b"x" + (damaged / "draft.onnx").read_bytes()[1:])
    assert main(["inspect", str(damaged)]) == 2
    assert "draft.onnx has changed" in capsys.readouterr().err


def test_inspect_tells_what_proposals_are_chosen_from(pair_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(pair_bundle, bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"markov_topk": 64}))
    for directory, expected in ((bundle, True), (pair_bundle, False)):
        assert main(["inspect", str(directory)]) == 0
        shown = capsys.readouterr().out
        assert ("chosen from the 64 most likely before the Markov correction" in shown) == expected
        assert "quantised" not in shown


def test_inspect_tells_of_a_missing_checkpoint(export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The moment one needs it: what the bundle is, and what it lacks."""
    source = export(GOLDEN / "vanilla", ctx_window="full", debug_outputs=True)
    bundle = tmp_path / "bundle"
    shutil.copytree(source, bundle)
    text = (bundle / "manifest.json").read_text().replace(str(GOLDEN / "vanilla"), str(tmp_path / "gone"))
    (bundle / "manifest.json").write_text(text)
    assert main(["inspect", str(bundle)]) == 1
    captured = capsys.readouterr()
    assert "block 7" in captured.out
    assert f"checkpoint file {tmp_path}/gone/target/model.safetensors is missing" in captured.err


def test_a_reader_that_has_enough(pair_bundle: Path) -> None:
    command = f"{sys.executable} -m dspark.runtime.cli run {pair_bundle} --prompt a --ignore-eos --max-tokens 300 | head -c 1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "Broken pipe" not in result.stderr


def test_interrupt_leaves_a_clean_terminal(pair_bundle: Path) -> None:
    """Ctrl-C while text streams: exit code 130 at once, what was shown stays, the line is ended."""
    command = [sys.executable, "-u", "-m", "dspark.runtime.cli", "run", str(pair_bundle), "--prompt", "a", "--ignore-eos"]
    process = subprocess.Popen([*command, "--max-tokens", "900"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert time.monotonic() - began < 5
    assert first + out
    assert "Traceback" not in err
    assert err.endswith("\n")


def test_interrupt_while_prompts_are_fed(pair_bundle: Path, tmp_path: Path) -> None:
    """Case I1: hundreds of long prompts; the results that were ready stay, whole lines."""
    (tmp_path / "p.jsonl").write_text(f'{{"ids": {[5] * 1000}}}\n' * 400)
    command = [sys.executable, "-m", "dspark.runtime.cli", "run", str(pair_bundle), "--prompt-file", str(tmp_path / "p.jsonl")]
    process = subprocess.Popen([*command, "--json", "--max-tokens", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=5)
    assert process.returncode == 130
    lines = (first + out).splitlines()
    assert 1 <= len(lines) < 400
    assert all(len(json.loads(line)["token_ids"]) == 2 for line in lines)
    assert "Traceback" not in err


def test_prompts_of_a_file_run_together(pair_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the file, each as it is alone; sampled ones too under a seed."""
    (tmp_path / "p.jsonl").write_text("".join(f'{{"ids": {list(range(5, 9 + 3 * i))}}}\n' for i in range(6)))
    options = ["--json", "--max-tokens", "20", "--temperature", "0.9", "--top-k", "30", "--top-p", "0.95", "--min-p", "0.01", "--seed", "4"]
    assert main(["run", str(pair_bundle), "--prompt-file", str(tmp_path / "p.jsonl"), *options, "--max-num-seqs", "3"]) == 0
    together = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    for i, tokens in enumerate(together):
        ids = ",".join(str(token) for token in range(5, 9 + 3 * i))
        assert main(["run", str(pair_bundle), "--prompt-ids", ids, *options]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == tokens
    assert main(["run", str(pair_bundle), "--prompt", QUESTION, "--stop", "nowhere", "--stop", "age", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["stop_reason"] == "age"
    assert result["text"].endswith('"Josh",\n  "')


def test_interrupt_at_the_chat_prompt(pair_bundle: Path) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "dspark.runtime.cli", "run", str(pair_bundle)]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while b"> " not in shown:
        shown += os.read(controller, 4096)
    time.sleep(0.5)  # until the line editor listens: a signal just before would wait for the next key
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    assert b"Traceback" not in shown
