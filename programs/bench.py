"""Time against theory: what a step costs, how many tokens a pass brings, and the speedup of both.
The letters alpha, c and v are explained at the top of sampling.py."""

from dataclasses import replace

import numpy as np

from programs.decode import compare, decode_plain, decode_speculative, stopwatch
from programs.options import about, clear_errors, parser_of, prepared, write_json
from sampling import seeded
from variants import DRAFTERS

GAMMAS = (1, 2, 4, 6, 8, 12, 16, 24, 32)  # at T=1 to where the speedup falls again


def expected_tokens(alpha, gamma):
    """Tokens per target pass if acceptances are i.i.d. (Leviathan et al. 2023, Equation 1)."""
    return gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speedup(tokens, drafts, c, v):
    """Of rounds with so many tokens and drafts: each takes as long as v + drafts · c plain steps,
    and a plain step brings one token (Theorem 3.8, where v is 1)."""
    return tokens / (v + drafts * c)


def timed(steps, now):
    """What a generator gives, and the seconds that it took to give each."""
    given, times = [], [now()]
    for item in steps:
        given.append(item)
        times.append(now())
    return given, np.diff(times).tolist()


def typical(seconds):
    """The median, without the first where there are others: it reads the prompt, or warms up."""
    return np.median(seconds[1:] or seconds)


def watch(pair, tokens, settings, now, eos=None):
    """Decodes, and yields of each round: it, the seconds of its drafts, the draws of its rule, and
    the length of the draft's cache, None where a drafter has none."""
    draw, draws, drafting = seeded(pair.target.device, settings.seed), [], []
    drafter = DRAFTERS[settings.drafter](pair, settings.warp())

    def choose(probs):
        draws.append((probs, draw(probs)))
        return draws[-1][1]

    def propose(*arguments):
        began = now()
        proposal = drafter(*arguments)
        drafting.append(now() - began)
        draws.clear()  # those that follow are the rule's
        return proposal

    for round_ in decode_speculative(pair, tokens, settings, eos, propose, choose):
        cache = getattr(drafter, "cache", None)
        yield round_, drafting[-1], list(draws), None if cache is None else cache.length


def costs(pair, tokens, settings, now):
    """(c, v) of one text: a draft step, and a round without its drafts (the pass over k+1 rows, the
    rule and the read), both in plain steps."""
    step = typical(timed(decode_plain(pair, tokens, settings), now)[1])
    seen, whole = timed(watch(pair, tokens, settings, now), now)
    per_draft = [drafting / max(1, len(round_.drafts)) for round_, drafting, *_ in seen]
    rest = [took - drafting for took, (_, drafting, *_) in zip(whole, seen)]
    return typical(per_draft) / step, typical(rest) / step


def measure(pair, prompts, settings, now):
    """The figures of one gamma. c and v come from runs of their own, with the clock inside.

    "eq1" is tokens a pass by Equation 1, from alpha, as if acceptances were i.i.d.; None for a rule
    that has no alpha. "predicted" is the speedup that follows from the tokens a pass and c and v.
    """
    c, v = np.median([costs(pair, tokens, settings, now) for tokens in prompts], axis=0).tolist()
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
       "({speedup_min:.2f}-{speedup_max:.2f})")


def table(pair, settings, gammas, now):
    """Print and return the figures of each gamma."""
    # Short prompts: to read them takes both ways as long, and it is decoding that is compared.
    prompts = [pair.encoding.encode_ordinary(prompt)[:16] for prompt in pair.prompts[:4]]
    print(HEAD.format(**vars(settings)), flush=True)
    rows = []
    for gamma in gammas:
        row = measure(pair, prompts, replace(settings, gamma=gamma), now)
        eq1 = "-" if row["eq1"] is None else f"{row['eq1']:.2f}"
        print(ROW.format(**row | {"eq1": eq1}), flush=True)
        rows.append(row)
    best = max(rows, key=lambda row: row["speedup"])
    print("best gamma: {gamma} ({speedup:.2f}x)".format(**best))
    return rows


def main(arguments=None):
    parser = parser_of("Time against theory.", arguments, prompt=False)
    parser.set_defaults(max_new=128, gamma=None, prompt="")
    options = parser.parse_args(arguments)
    gammas = GAMMAS if options.gamma is None else [options.gamma]
    options.gamma = gammas[0]
    with clear_errors(parser):
        pair, settings, _ = prepared(options)
        print(*about(pair).values(), sep="\n")
        rows = table(pair, settings, gammas, stopwatch(pair.target.device))
        write_json(options.json, {**about(pair), "rows": rows})


if __name__ == "__main__":
    main()
