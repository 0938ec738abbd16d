"""The program behind `python specdec.py`: a text in the colours of its writers, and both times."""

import os
import statistics
import sys
import time
from dataclasses import replace

import torch

from programs.options import about, clear_errors, parser_of, prepared, printable, write_json
from sampling import seeded
from specdec import plain, speculative
from variants import DRAFTERS, RULES
from vocabulary import speller


def decode_plain(pair, tokens, settings):
    """The target alone: yields the new ids."""
    choose = seeded(pair.target.device, settings.seed)
    return plain(pair.target, tokens, settings.max_new, warp=settings.warp(), choose=choose)


def decode_speculative(pair, tokens, settings, eos=None, propose=None, choose=None):
    """Draft and target: yields a Round a pass. propose: a drafter, in place of a new one. choose:
    a draw, in place of one from the seed."""
    return speculative(
        pair.target, propose or DRAFTERS[settings.drafter](pair, settings.warp()), tokens,
        settings.max_new, gamma=settings.gamma, warp=settings.warp(),
        choose=choose or seeded(pair.target.device, settings.seed), verify=RULES[settings.verify],
        eos=eos)


def stopwatch(device):
    """A clock: now() is the time in seconds, once the device has done all that it was given."""
    def now():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def rates(new_tokens, plain_seconds, seconds):
    """Tokens a second and speedups, from the seconds of each repeat for as many tokens."""
    speedups = [theirs / mine for theirs, mine in zip(plain_seconds, seconds)]
    spread = max(max(runs) / min(runs) for runs in (plain_seconds, seconds))
    return {"plain_tokens_per_s": new_tokens / statistics.median(plain_seconds),
            "speculative_tokens_per_s": new_tokens / statistics.median(seconds),
            "speedup": statistics.median(speedups), "speedup_min": min(speedups),
            "speedup_max": max(speedups), "runs": len(speedups), "spread": spread}


def tally(rounds, verify="token"):
    """Sums over rounds, of tokens that joined the text. "tested": drafts up to the first rejection,
    it included. "acceptance" is accepted/tested. With the token rule it estimates alpha."""
    writers = [writer for round_ in rounds for writer in round_.writers]
    accepted, corrections, bonuses = map(writers.count, ("draft", "correction", "bonus"))
    tested = accepted + corrections
    acceptance = accepted / max(1, tested)
    return {"new_tokens": len(writers), "passes": len(rounds), "accepted": accepted,
            "corrections": corrections, "bonuses": bonuses, "tested": tested,
            "drafted": sum(len(round_.drafts) for round_ in rounds),
            "tokens_per_pass": len(writers) / max(1, len(rounds)),
            "acceptance": acceptance, "alpha": acceptance if verify == "token" else None}


def compare(pair, prompts, settings, now):
    """The figures of both ways, timed in turn: a machine is faster at some times than at others.
    They write past an end of text, so that both do the same work. pair: any object with target,
    draft, bits_per_byte, and an encoding with eot_token."""
    # Each prompt has a seed of its own; ^ stays within the range of seeds.
    texts = [(pair, tokens, replace(settings, seed=settings.seed ^ i))
             for i, tokens in enumerate(prompts)]
    plain_seconds, seconds = [], []
    for _ in range(4):
        began = now()
        ids = [token for text in texts for token in decode_plain(*text)]
        between = now()
        rounds = [round_ for text in texts for round_ in decode_speculative(*text)]
        plain_seconds.append(between - began)
        seconds.append(now() - between)
    speeds = rates(len(ids), plain_seconds[1:], seconds[1:])  # the first of each is slow
    if speeds["spread"] > 1.3:
        print(f"The machine is busy: its runs differ by {speeds['spread']:.1f} to 1. Try again.")
    return {**vars(settings), **tally(rounds, settings.verify), **speeds,
            "plain_new_tokens": len(ids), "bits_per_byte": pair.bits_per_byte}


# Who wrote a token: colours that can be read on black and on white, and a second sign for each.
STYLES = {"prompt": "38;5;244", "draft": "38;5;35", "correction": "4;38;5;166",
          "bonus": "1;38;5;33"}


def styled(text, writer):
    """Text in its writer's colour on a terminal that has colours, and as it is elsewhere."""
    isatty = getattr(sys.stdout, "isatty", lambda: False)
    plain_text = os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR") or not isatty()
    return text if plain_text else f"\x1b[{STYLES[writer]}m{text}\x1b[0m"


def print_text(tokens, rounds, encoding):
    """Print the prompt, then each round as it comes, each token in the colour of its writer.
    Returns the rounds."""
    spell, done = speller(encoding), []
    print("written by:", *(styled(writer, writer) for writer in STYLES), end="\n\n")
    print(styled(printable("".join(map(spell, tokens))), "prompt"), end="")
    for round_ in rounds:
        for token, writer in zip(round_.new, round_.writers):
            print(styled(printable(spell(token)), writer), end="", flush=True)
        done.append(round_)
    print(printable(spell(encoding.eot_token, final=True)))
    return done


def print_comparison(figures, rounds):
    """Both ways as bars to scale, and who wrote the text that was printed above."""
    ways = [("plain", figures["plain_tokens_per_s"], figures["plain_new_tokens"]),
            ("speculative", figures["speculative_tokens_per_s"], figures["passes"])]
    slowest = min(rate for _, rate, _ in ways)
    for name, rate, passes in ways:
        ms, bar = 1000 * figures["new_tokens"] / rate, "█" * round(30 * slowest / rate)
        print(f"{name:<11} {bar:<30} {ms:6.0f} ms {passes:4} passes {rate:5.0f} tokens/s")
    print("{speedup:.2f}x ({runs} runs: {speedup_min:.2f} to {speedup_max:.2f}) at γ = {gamma}, "
          "{tokens_per_pass:.2f} tokens a pass".format(**figures))
    shown = sum(len(round_.new) for round_ in rounds)
    if shown < figures["new_tokens"]:
        print(f"the text ended after {shown} tokens; both ways were timed past that")
    print("{accepted} of {drafted} drafts kept, {corrections} corrections, {bonuses} bonuses"
          .format(**figures))


def main(arguments=None):
    parser = parser_of("Write a text both ways.", arguments)
    options = parser.parse_args(arguments)
    with clear_errors(parser):
        pair, settings, tokens = prepared(options)
        coming = decode_speculative(pair, tokens, settings, pair.encoding.eot_token)
        rounds = print_text(tokens, coming, pair.encoding)
        print("\ntiming both ways ...", flush=True)
        figures = compare(pair, [tokens], settings, stopwatch(pair.target.device))
        print_comparison(figures, rounds)
        print(*about(pair).values(), f"{pair.minutes:g} minutes of training", sep="\n")
        write_json(options.json, {**figures, "rounds": rounds})
