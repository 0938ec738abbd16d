"""Time against theory: what a step costs, how many tokens a pass brings, and the speedup of both.

    python -m programs.bench                         the tables, in some minutes
    python -m programs.bench --verify block --gamma 8      one way alone

The letters alpha, c and v are explained at the top of sampling.py.
"""

from dataclasses import replace
from operator import itemgetter

import numpy as np
import torch

from programs.decode import BUSY, compare, decode_plain, decode_speculative, stopwatch
from programs.options import clear_errors, machine, parser_of, prepared, write_json
from variants import DRAFTERS

GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16)  # to where the speedup falls again


# ---------------------------------------------------------------- theory

def expected_tokens(alpha, gamma):
    """Tokens per target pass if acceptances are i.i.d. (Leviathan et al. 2023, Equation 1)."""
    return gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speedup(tokens, drafts, c, v):
    """Of rounds that bring so many tokens from so many drafts: each takes as long as v + drafts · c
    plain steps, and a plain step brings one token (Theorem 3.8, where v is 1)."""
    return tokens / (v + drafts * c)


# ---------------------------------------------------------------- what a pass and a step cost

def timed(steps, now):
    """What a generator gives, and the seconds that it took to give each."""
    given, times = [], [now()]
    for one in steps:
        given.append(one)
        times.append(now())
    return given, np.diff(times).tolist()


def typical(seconds):
    """The median, without the first where there are others: it reads the prompt, or warms up."""
    return np.median(seconds[1:] or seconds)


@torch.inference_mode()
def pass_times(target, now, cached=128):
    """{rows: ms} of a target pass over so many rows, behind so many tokens. Medians of 60."""
    cache, ids, ms = target.new_cache(), torch.zeros(1, cached, dtype=torch.long), {}
    target(ids.to(target.device), cache)
    for rows in (1, 2, 4, 8, 16):
        seconds = []
        for _ in range(60):
            cache.length, began = cached, now()
            target(ids[:, :rows].to(target.device), cache)
            seconds.append(now() - began)
        ms[rows] = 1000 * typical(seconds)
        print(f"pass over {rows:2} rows{ms[rows]:7.2f} ms  {'█' * round(10 * ms[rows] / ms[1])}")
    return ms


def round_costs(pair, tokens, settings, now):
    """Seconds of (a draft step, a round without its drafts: a pass over k+1 rows, the rule and the
    read). A text is decoded with the clock inside of the loop."""
    drafter, drafting = DRAFTERS[settings.drafter](pair, settings.warp()), []

    def propose(*arguments):
        began = now()
        proposal = drafter(*arguments)
        drafting.append(now() - began)
        return proposal

    rounds, whole = timed(decode_speculative(pair, tokens, settings, propose=propose), now)
    per_draft = [took / max(1, len(one.drafts)) for took, one in zip(drafting, rounds)]
    return typical(per_draft), typical(np.subtract(whole, drafting).tolist())


# ---------------------------------------------------------------- measured beside predicted

def measure(pair, prompts, settings, now):
    """The figures of one gamma. c and v come from runs of their own, with the clock inside.

    "eq1" is tokens a pass by Equation 1, from alpha, as if acceptances were i.i.d.; None for a rule
    that has no alpha. "predicted" is the speedup that follows from the tokens a pass and c and v.
    """
    costs = []
    for tokens in prompts:
        step = typical(timed(decode_plain(pair, tokens, settings), now)[1])
        costs.append(np.divide(round_costs(pair, tokens, settings, now), step))
    c, v = np.median(costs, axis=0).tolist()
    figures = compare(pair, prompts, settings, now)
    alpha, drafts = figures["alpha"], figures["drafted"] / figures["passes"]
    eq1 = None if alpha is None else expected_tokens(alpha, drafts)
    return {**figures, "c": c, "v": v, "eq1": eq1,
            "predicted": expected_speedup(figures["tokens_per_pass"], drafts, c, v)}


HEAD = """
{drafter}, {verify} rule, temperature {temperature:g}
      tokens a pass  accepted             tokens/s    speedup
gamma measured Eq. 1  /tested     c    v plain  spec. predicted measured (spread)"""
ROW = ("{gamma:5}{tokens_per_pass:9.2f}{eq1:>6}{acceptance:9.3f}{c:6.3f}{v:5.2f}"
       "{plain_tokens_per_s:6.0f}{speculative_tokens_per_s:7.0f}{predicted:10.2f}{speedup:9.2f} "
       "({speedup_min:.2f}-{speedup_max:.2f}){busy}")


def print_row(row):
    eq1 = "-" if row["eq1"] is None else f"{row['eq1']:.2f}"
    busy = " busy" if row["spread"] > BUSY else ""
    print(ROW.format(**row | {"eq1": eq1, "busy": busy}), flush=True)


# ---------------------------------------------------------------- command line

def about(pair):
    """What runs, and where: the first figures."""
    figures = {"machine": machine(pair), "device": pair.target.device.type,
               "threads": torch.get_num_threads()}
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        figures[name] = {"parameters": sum(w.numel() for w in model.parameters()),
                         "layers": model.config.n_layer, "width": model.config.n_embd,
                         "bits_per_byte": pair.bits_per_byte[name]}
        print(name + ": {parameters:,} parameters, {layers} layers of width {width}, "
              "{bits_per_byte:.3f} bits/byte".format(**figures[name]))
    print(f"on {machine(pair)}\n")
    return figures


def ways_of(options):
    """(drafter, rule, temperature) of each table: the one asked for, or the usual ones. Where q is
    one-hot (temperature 0, lookup) the block rule is the token rule."""
    if (options.drafter, options.verify, options.temperature) != (None, None, None):
        temperature = 1.0 if options.temperature is None else options.temperature
        return [(options.drafter or "model", options.verify or "token", temperature)]
    return [("model", "token", 1.0), ("model", "block", 1.0), ("lookup", "token", 1.0),
            ("model", "token", 0.0), ("lookup", "token", 0.0)]


def table(pair, settings, gammas, now):
    """Print and return the figures of each gamma."""
    # Short prompts: to read them takes both ways as long, and it is decoding that is compared.
    prompts = [pair.encoding.encode_ordinary(prompt)[:16] for prompt in pair.prompts[:4]]
    print(HEAD.format(**vars(settings)), flush=True)
    rows = []
    for gamma in gammas:
        rows.append(measure(pair, prompts, replace(settings, gamma=gamma), now))
        print_row(rows[-1])
    print("best gamma: {gamma} ({speedup:.2f}x)".format(**max(rows, key=itemgetter("speedup"))))
    return rows


def main(arguments=None):
    parser = parser_of("Time against theory.", arguments, prompt=False)
    parser.set_defaults(max_new=128, drafter=None, verify=None, temperature=None)
    options = parser.parse_args(arguments)
    with clear_errors(parser):
        ways, gammas = ways_of(options), [options.gamma] if options.gamma else GAMMAS
        options.drafter, options.verify, options.temperature = ways[0]
        pair, settings, _ = prepared(options)
        now = stopwatch(pair.target.device)
        figures = {**about(pair), "pass_ms": pass_times(pair.target, now), "rows": []}
        for drafter, verify, temperature in ways:
            way = dict(drafter=drafter, verify=verify, temperature=temperature)
            figures["rows"] += table(pair, replace(settings, **way), gammas, now)
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
