"""`dspark run`, `dspark bench` and `dspark inspect`: command line of the runtime.

Knows arguments, messages and exit codes: 0 done, 1 outputs differ or files changed, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.runtime.backend import BACKENDS, ONNXRUNTIME
from dspark.runtime.bundle import full_hash_faults, load_bundle, reference_faults
from dspark.runtime.describe import describe_bundle
from dspark.runtime.errors import DSparkError, RequestError
from dspark.runtime.prompts import read_prompts

if TYPE_CHECKING:
    from dspark.runtime.llm import LLM
    from dspark.runtime.prompts import Prompt
    from dspark.runtime.sampling import SamplingParams
    from dspark.runtime.stats import Stats
    from dspark.runtime.stream import RequestOutput, Stream


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        code: int = args.command(args)
        return code
    except DSparkError as error:
        print(f"dspark: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"dspark: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    params, kwargs = _params(args), {"enable_thinking": True} if args.enable_thinking else {}
    llm, prompts = _opened(args, kwargs, speculative=not args.no_speculative)
    if args.compare and args.no_speculative:
        raise RequestError("--compare decodes both ways: leave out --no-speculative")
    if args.compare and not params.is_greedy:
        raise RequestError("--compare checks that outputs are identical, which samples are not: leave out --temperature")
    if args.compare:
        return _compare(llm, prompts, params, kwargs, as_json=args.json)
    if not prompts and args.json:
        raise RequestError("--json needs a prompt: pass --prompt, --prompt-ids or --prompt-file")
    if not prompts:
        return _chat(llm, params, kwargs)
    for stream in llm.streams(prompts, params, chat_template_kwargs=kwargs):
        if args.json:
            print(json.dumps(_result(stream.result())), flush=True)
        else:
            _show(llm, stream)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from dspark.runtime.bench import measure, report, summary

    llm, prompts = _opened(args, {})
    if not prompts:
        raise RequestError("bench needs prompts of the kind that will be served: pass --prompt, --prompt-ids or --prompt-file")
    numbers = summary(measure(llm, prompts, _params(args), args.repeats))
    print(json.dumps(numbers, indent=2) if args.json else report(numbers, profile=args.profile))
    return 0


def _params(args: argparse.Namespace) -> SamplingParams:
    # Imported here, where Ctrl-C is caught: numpy alone takes a tenth of a second.
    from dspark.runtime.sampling import SamplingParams

    names = ("max_tokens", "ignore_eos", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
    return SamplingParams(**{name: getattr(args, name) for name in names})


def _opened(args: argparse.Namespace, kwargs: dict[str, Any], *, speculative: bool = True) -> tuple[LLM, list[Prompt]]:
    """Return the bundle, loaded, and the prompts of the command line, checked."""
    from dspark.runtime.llm import LLM

    prompts = list(_prompts(args))
    llm = LLM(
        args.bundle,
        speculative=speculative,
        num_speculative_tokens=args.num_speculative_tokens,
        max_num_seqs=args.max_num_seqs,
        max_seq_len=args.max_seq_len,
        threads=args.threads,
        backend=args.backend,
        prepacked_cache=args.prepacked_cache,
    )
    prompts = [_as_message(llm, prompt, raw=args.raw) for prompt in prompts]
    for number, prompt in enumerate(prompts, 1):
        try:
            llm.encode(prompt, kwargs)
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error}") from None
    return llm, prompts


def _prompts(args: argparse.Namespace) -> Iterator[Prompt]:
    """Yield the prompts of the command line."""
    if args.prompt is not None:
        yield args.prompt
    if args.prompt_ids is not None:
        try:
            yield [int(token) for token in args.prompt_ids.split(",")]
        except ValueError:
            raise RequestError(f"--prompt-ids {args.prompt_ids!r}: expected token ids like 1,2,3") from None
    if args.prompt_file is not None:
        yield from read_prompts(args.prompt_file, args.limit)
    elif args.limit is not None:
        raise RequestError("--limit is for a .jsonl file: pass it with --prompt-file")


def _as_message(llm: LLM, prompt: Prompt, *, raw: bool) -> Prompt:
    """Text is a user's message where there is a chat template, unless it is meant raw."""
    if raw or not isinstance(prompt, str) or llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        return prompt
    return [{"role": "user", "content": prompt}]


def _show(llm: LLM, stream: Stream) -> str:
    """Print a stream's text as it is committed, then a line of statistics; return the text."""
    text = ""
    for piece in stream:
        shown = piece.text if llm.tokenizer is not None else "".join(f"{token} " for token in piece.token_ids)
        text += shown
        print(shown, end="", flush=True)
        if piece.output is not None:
            print(flush=True)
            print(f"[{_describe(piece.output.stats)}, finish {piece.output.finish_reason}]", file=sys.stderr)
    return text


def _chat(llm: LLM, params: SamplingParams, kwargs: dict[str, Any]) -> int:
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise RequestError("this bundle has no tokenizer or no chat template: pass --prompt-ids, --prompt or --prompt-file")
    print("Chat with the target; an empty line or Ctrl-D ends.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print(file=sys.stderr)
            return 0
        if not line.strip():
            return 0
        turn = {"role": "user", "content": line}
        try:
            answer = _show(llm, llm.stream([*messages, turn], params, chat_template_kwargs=kwargs))
        except RequestError as error:
            print(f"dspark: {error}" + ("; the history is cleared, ask again" if messages else ""), file=sys.stderr)
            messages.clear()
            continue
        messages += [turn, {"role": "assistant", "content": answer}]


def _compare(llm: LLM, prompts: list[Prompt], params: SamplingParams, kwargs: dict[str, Any], *, as_json: bool) -> int:
    """Decode each prompt speculatively and plainly in turn, check identity and print both speeds."""
    from dspark.runtime.stats import Stats

    if not prompts:
        raise RequestError("--compare needs a prompt: pass --prompt, --prompt-ids or --prompt-file")
    speculative, plain, different = Stats(), Stats(), []
    results = []
    for number, prompt in enumerate(prompts):
        (ours,) = llm.generate([prompt], params, speculative=True, chat_template_kwargs=kwargs)
        (theirs,) = llm.generate([prompt], params, speculative=False, chat_template_kwargs=kwargs)
        speculative.add(ours.stats)
        plain.add(theirs.stats)
        if ours.token_ids != theirs.token_ids:
            different.append(number)
        results.append(_result(ours))
        if not as_json and len(prompts) == 1:
            print(ours.text if ours.text is not None else ours.token_ids)
    proposals = max(speculative.proposed, default=0)
    rates = speculative.acceptance_per_position(proposals)
    ratio = speculative.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    if as_json:
        summary = {
            "identical": not different,
            "different_prompts": different,
            "speculative_tokens_per_second": speculative.tokens_per_second,
            "plain_tokens_per_second": plain.tokens_per_second,
            "ratio": ratio,
            "mean_accepted_length": speculative.mean_accepted_length,
            "acceptance_per_position": rates,
            "results": results,
        }
        print(json.dumps(summary, indent=2))
    else:
        print(f"prompts            {len(prompts)}, {speculative.tokens} tokens; outputs {'DIFFER' if different else 'identical'}")
        print(f"speculative        {speculative.tokens_per_second:8.1f} tok/s")
        print(f"plain              {plain.tokens_per_second:8.1f} tok/s")
        print(f"ratio              {ratio:8.2f}")
        print(f"accepted length    {speculative.mean_accepted_length:8.2f} tokens a round, bonus included")
        print(f"accepted at 1..{proposals}   " + " ".join(f"{rate:.2f}" for rate in rates))
        if different:
            print(f"different prompts: {different}")
    return 1 if different else 0


def _describe(stats: Stats) -> str:
    return (
        f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} tok/s, {stats.rounds} rounds, "
        f"mean accepted length {stats.mean_accepted_length:.2f}"
    )


def _result(output: RequestOutput) -> dict[str, Any]:
    stats = output.stats
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "prompt_tokens": stats.prompt_tokens,
        "accepted_per_round": stats.accepted_per_round,
        "mean_accepted_length": stats.mean_accepted_length,
        "tokens_per_second": stats.tokens_per_second,
        "seconds": stats.seconds,
    }


def _inspect(args: argparse.Namespace) -> int:
    bundle = load_bundle(args.bundle, references=False)
    changed = [*reference_faults(bundle.manifest), *(full_hash_faults(bundle) if args.hash else [])]
    if args.json:
        print(bundle.manifest.to_json(), end="")
    else:
        print(describe_bundle(bundle))
    for fault in changed:
        print(fault, file=sys.stderr)
    if args.hash and not changed:
        print(f"all {len(bundle.manifest.files)} files have their recorded sha256", file=sys.stderr)
    return 1 if changed else 0


def positive(text: str) -> int:
    """Parse an argument that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def _add_decoding(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the bundle, the prompts and how they are decoded; return the group of the last."""
    parser.add_argument("bundle", type=Path, help="bundle directory made by dspark-export")
    prompt = parser.add_argument_group("prompt").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="a user's message, rendered with the chat template if there is one")
    prompt.add_argument("--prompt-file", type=Path, help="a text file, or .jsonl with ids, messages or text in each line")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids")
    parser.add_argument("--limit", type=positive, metavar="N", help="first N lines of a .jsonl file only")
    parser.add_argument("--raw", action="store_true", help="take text as it is, without the chat template")
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--max-tokens", type=int, default=256, help="most tokens to generate (default 256)")
    decoding.add_argument("--ignore-eos", action="store_true", help="go on behind the model's end tokens")
    decoding.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    decoding.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens")
    decoding.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the most likely tokens of probability P in all")
    decoding.add_argument("--min-p", type=float, default=0.0, metavar="P", help="keep tokens of at least P times the largest probability")
    decoding.add_argument("--seed", type=int, help="makes sampled output reproducible")
    decoding.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end where this text appears; may be repeated")
    decoding.add_argument("--max-num-seqs", type=int, metavar="N", help="prompts decoded at once (default: the bundle's limit)")
    decoding.add_argument("--num-speculative-tokens", type=int, metavar="N", help="proposals a round (default: all the bundle serves)")
    decoding.add_argument("--max-seq-len", type=int, metavar="S", help="most tokens of prompt and output (default: the bundle's limit)")
    decoding.add_argument("--backend", choices=BACKENDS, default=ONNXRUNTIME, help="what runs the graphs (default onnxruntime, on the CPU)")
    decoding.add_argument("--threads", type=int, metavar="N", help="threads of ONNX Runtime (default: one a physical core)")
    decoding.add_argument("--prepacked-cache", type=Path, metavar="DIR", help="keep weights packed for this CPU here, to load faster")
    parser.add_argument("--json", action="store_true", help="print machine-readable results")
    return decoding


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dspark", description="Generate from a dspark bundle.")
    parser.add_argument("--version", action="version", version=f"dspark {version('dspark')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="generate text, or chat when no prompt is given")
    run.set_defaults(command=_run)
    decoding = _add_decoding(run)
    run.add_argument("--enable-thinking", action="store_true", help="let the chat template ask for thinking")
    decoding.add_argument("--no-speculative", action="store_true", help="decode plainly")
    decoding.add_argument("--compare", action="store_true", help="decode plainly too, check identity, print both speeds")
    bench = commands.add_parser("bench", help="measure plain and speculative decoding, prompt by prompt in turn")
    bench.set_defaults(command=_bench)
    _add_decoding(bench)
    bench.add_argument("--repeats", type=positive, default=3, metavar="N", help="runs over all prompts, medians are shown (default 3)")
    bench.add_argument("--profile", action="store_true", help="show the stages of a round")
    inspect = commands.add_parser("inspect", help="say what a bundle is, needs and holds")
    inspect.set_defaults(command=_inspect)
    inspect.add_argument("bundle", type=Path, help="bundle directory")
    inspect.add_argument("--json", action="store_true", help="print the manifest")
    inspect.add_argument("--hash", action="store_true", help="read all files and compare their sha256")
    return parser


if __name__ == "__main__":
    sys.exit(main())
