"""Command-line options of one request, and the `SamplingParams` that they ask for."""

from __future__ import annotations

import argparse
import secrets
from dataclasses import replace
from pathlib import Path

from trtllm_tree.config.guided_decoding import GuidedDecodingParams
from trtllm_tree.config.sampling import SamplingParams
from trtllm_tree.errors import ConfigError, Problem, RequestError


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a request: what is drawn, where it ends, and its form."""
    _add_sampling_arguments(parser)
    _add_stop_arguments(parser)
    _add_grammar_arguments(parser)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "greedy without a temperature, top-k and top-p")
    group.add_argument(
        "--temperature",
        type=float,
        help="what logits are divided by; 0 is greedy (default: 1 with --top-k or --top-p)",
    )
    group.add_argument("--top-k", type=int, help="draw among the likeliest K tokens")
    group.add_argument(
        "--top-p", type=float, help="of these, among the likeliest that hold P of the probability"
    )
    group.add_argument("--min-p", type=float, help="of these, among those P times as likely as the likeliest")
    group.add_argument("--repetition-penalty", type=float, help="divides logits of tokens seen (default: 1)")
    group.add_argument(
        "--frequency-penalty", type=float, help="taken off for every time a token was generated"
    )
    group.add_argument("--presence-penalty", type=float, help="taken off for a token that was generated")
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=BIAS",
        help="added to the logit of a token id; may be repeated",
    )
    group.add_argument(
        "--bad-word", action="append", metavar="TEXT", help="is not generated; may be repeated"
    )
    group.add_argument("--seed", type=int, help="of the draws (default: a new one, which is printed)")


def _add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--max-tokens", type=int, default=64, help="tokens to generate (default: 64)")
    group.add_argument("--min-tokens", type=int, default=0, help="tokens before the output may end")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the output; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end token")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="show each token's log-probability and the N likeliest"
    )


def _add_grammar_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output", "the form of the output; one of these")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE", help="JSON that is valid by this schema")
    one.add_argument("--json-object", action="store_true", help="any JSON object or array")
    one.add_argument("--regex", metavar="TEXT", help="a text that matches as a whole")
    one.add_argument("--choice", action="append", metavar="TEXT", help="one of the texts; may be repeated")
    one.add_argument(
        "--grammar", metavar="FILE", help="a text of this EBNF grammar, whose first rule is root"
    )


def _grammar_of(args: argparse.Namespace) -> GuidedDecodingParams | None:
    options = {
        "json": None if args.json_schema is None else _file_text("--json-schema", args.json_schema),
        "json_object": args.json_object,
        "regex": args.regex,
        "choice": args.choice,
        "grammar": None if args.grammar is None else _file_text("--grammar", args.grammar),
    }
    return (
        GuidedDecodingParams(**options)
        if any(value not in (None, False) for value in options.values())
        else None
    )


def _file_text(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule, remedy = f"cannot be read ({error})", "Name a text file in UTF-8."
        raise ConfigError(Problem(option, path, rule, remedy)) from error


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, as in 42=-1.5") from None


def params_of(args: argparse.Namespace) -> SamplingParams:
    """The request of the command line; a missing seed is drawn here, so that every run has the same.

    Raises:
        RequestError: with every wrong value, before a model is loaded.
    """
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        logit_bias=dict(args.logit_bias) if args.logit_bias else None,
        min_tokens=args.min_tokens,
        bad_words=args.bad_word,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        guided_decoding=_grammar_of(args),
    )
    if problems := params.validate():
        raise RequestError(problems)
    return replace(params, seed=secrets.randbits(64)) if params.is_sampled and args.seed is None else params
