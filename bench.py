"""Time against theory: what a step costs, how many tokens a pass brings, and the speedup of both.

    python bench.py                  the tables, in some minutes
    python bench.py --svg FILE       and a picture of speedup against gamma

The letters alpha, c and v are explained at the top of sampling.py. A rule or a drafter of your own
is measured too, once it is in sampling.VERIFY or specdec.DRAFTERS.
"""

import html
import math
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

import program
from pair import dtype_name
from sampling import VERIFY, p_over_q
from specdec import DRAFTERS, decode_plain, decode_speculative

GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16)  # to where the speedup falls again


# ---------------------------------------------------------------- theory

def expected_tokens(alpha, gamma):
    """Tokens per target pass if acceptances are i.i.d. (Leviathan et al. 2023, Equation 1)."""
    return gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speedup(tokens, drafts, c, v):
    """Of rounds that bring so many tokens from so many drafts: each takes as long as v + drafts · c
    plain steps, and a plain step brings one token (Theorem 3.8, where v is 1)."""
    return tokens / (v + drafts * c)


def survival_token(q_over_p):
    """P(at least i drafts stood | the text), i = 0, 1, ..., from q(y) / p(y) of the tokens y there:
    one that is there came as a draft with probability min(1, q(y) / p(y)) (docs/theory.md, 3)."""
    return list(accumulate(q_over_p, lambda stand, ratio: stand * min(1, ratio), initial=1.0))


def survival_block(q_over_p):
    """The same for the block rule: the least so far of 1 and the products of q / p."""
    products = accumulate(q_over_p, lambda product, ratio: min(product * ratio, 1e30), initial=1.0)
    return list(accumulate(products, min))  # 1e30: finite, since inf · 0 is NaN


SURVIVAL = {"token": survival_token, "block": survival_block}


def expected_passes(q_over_p, survival):
    """The mean number of target passes of a text, given the text. Nothing is taken to be i.i.d.

    q_over_p[t]: q(y) / p(y) of the next tokens y, had they been drafted where t tokens are written.
    A round that starts at t and accepts i drafts is followed by one that starts at t+i+1.
    """
    total = len(q_over_p)
    passes = np.zeros(total + 1)  # from t on
    for t in reversed(range(total)):
        ends = -np.diff(survival(q_over_p[t][:total - t - 1]), append=0)  # P(i drafts accepted)
        passes[t] = 1 + ends @ passes[t + 1:][:len(ends)]
    return passes[0]


@torch.inference_mode()
def text_ratios(target, propose, prompt, text, gamma, warp):
    """q_over_p of a text. The drafter itself is asked at each place, by a choose that makes it
    draft what the text goes on with."""
    ids, start = torch.tensor(prompt + text, device=target.device), len(prompt)
    # In this one wide pass a p(y) may be rounded to 0, and 0 / 0 would be NaN: then q / p is 0.
    p = warp(target(ids[None, :-1])[0, start - 1:]).clamp(min=1e-30)  # (N, V)
    ratios = []
    for t in range(len(text)):
        coming = iter(ids[start + t:, None])  # (1,) each
        asked = min(gamma, len(text) - t - 1)
        _, q = propose(prompt + text[:t], asked, lambda probs: next(coming))  # (γ, V)
        y = ids[start + t:][:len(q)]
        ratios.append((1 / p_over_q(p[t:][:len(q)], q, y)).tolist())
    return ratios


# ---------------------------------------------------------------- what a pass and a step cost

def laps(steps, now):
    """What a generator gives, and the seconds that it took to give each."""
    given, times = [], [now()]
    for one in steps:
        given.append(one)
        times.append(now())
    return given, np.diff(times).tolist()


def typical(seconds):
    """The median, without the first where there are others: it reads the prompt, or warms up."""
    return np.median(seconds[1:] or seconds)


def bottleneck(target, now):
    """Time of a target pass against the rows that it carries, and the tokens cached before it."""
    array = torch.ones(2 ** 27, device=target.device)  # half a gigabyte, larger than most caches
    rate = array.nbytes / typical(laps((array.sum() for _ in range(7)), now)[1]) / 1e9
    # The embedding is not read as a whole, but by the row.
    moved = sum(w.nbytes for w in target.parameters() if w is not target.embed) / 1e6
    print(f"\nA target pass reads {moved:.1f} MB of weights, however many its rows. At the rate\n"
          f"of the sum of a large array, {rate:.1f} GB/s here, that takes {moved / rate:.2f} ms.")
    quarter = target.config.context // 4
    shapes = [(1, cached) for cached in (0, quarter, 2 * quarter, 3 * quarter)]
    shapes += [(rows, quarter) for rows in (2, 4, 8, 16)]
    passes = [partial(one_pass, target, target.new_cache(), *shape) for shape in shapes]
    _, seconds = program.race(passes, now, repeats=60)
    ms = {shape: 1000 * typical(taken) for shape, taken in zip(shapes, seconds)}
    for (rows, cached), taken in ms.items():
        ratio = taken / ms[1, quarter]
        bar = "█" * round(10 * ratio)
        print(f"{rows:4} rows, {cached:4} cached{taken:9.2f} ms {ratio:6.2f}  {bar}")
    return {"memory_gb_per_s": rate,
            "pass_ms": {rows: taken for (rows, cached), taken in ms.items() if cached == quarter},
            "pass_ms_by_length": {cached: ms[1, cached] for rows, cached in ms if rows == 1}}


@torch.inference_mode()
def one_pass(target, cache, rows, cached):
    """A pass over so many rows behind so many tokens. The first time it fills the cache, too.
    Returns logits, and `race` goes through them as it does through the tokens of a text."""
    cache.length = min(cached, cache.length)
    fed = cached + rows - cache.length
    return target(torch.zeros(1, fed, dtype=torch.long, device=target.device), cache, rows)


def round_costs(pair, tokens, settings, now):
    """Seconds of (a draft step, a round without its drafts: a pass over γ+1 rows, the rule and the
    read). A text is decoded with the clock inside of the loop."""
    drafter, drafting = DRAFTERS[settings.drafter](pair, settings.warp()), []

    def propose(*arguments):
        began = now()
        proposal = drafter(*arguments)
        drafting.append(now() - began)
        return proposal

    rounds, whole = laps(decode_speculative(pair, tokens, settings, propose=propose), now)
    per_draft = [took / max(1, len(one.drafts)) for took, one in zip(drafting, rounds)]
    return typical(per_draft), typical(np.subtract(whole, drafting).tolist())


# ---------------------------------------------------------------- measured beside predicted

def measure(pair, prompts, settings, now):
    """The figures of one gamma. c and v come from runs of their own, which also warm up. Then both
    ways run in turn with the clock outside, past an end of text, so that they do the same work."""
    # Each prompt has a seed of its own; ^ stays within the range of seeds.
    texts = [(pair, tokens, replace(settings, seed=settings.seed ^ i))
             for i, tokens in enumerate(prompts)]
    steps = [typical(laps(decode_plain(*text), now)[1]) for text in texts]
    costs = [np.divide(round_costs(*text, now), step) for text, step in zip(texts, steps)]
    c, v = np.median(costs, axis=0).tolist()
    ways = [lambda: (list(decode_plain(*text)) for text in texts),
            lambda: (list(decode_speculative(*text)) for text in texts)]
    (ids, runs), (plain_seconds, seconds) = program.race(ways, now)
    plain_new = sum(map(len, ids))
    return {**against_theory(pair, prompts, settings, runs, c, v), "plain_new_tokens": plain_new,
            **program.rates(plain_new, plain_seconds, seconds)}


def against_theory(pair, prompts, settings, runs, c, v):
    """The counts of one gamma, and what theory makes of them. runs: the rounds of each prompt.

    "expected" is tokens per pass from the acceptance of each token, "predicted" the speedup that
    follows; None for a rule or a drafter of which theory knows nothing. "eq1" is tokens per pass by
    Equation 1, as if acceptances were i.i.d.; None for all rules but its own, the token rule.
    """
    rounds, warp = [one for run in runs for one in run], settings.warp()
    counts = program.tally(rounds)
    eq1 = expected = predicted = None
    if settings.verify == "token":
        eq1 = np.mean([expected_tokens(counts["alpha"], len(one.drafts)) for one in rounds])
    if settings.verify in SURVIVAL and settings.drafter in ("model", "lookup"):
        passes = 0
        for prompt, run in zip(prompts, runs):
            text = [y for one in run for y in one.new]
            propose = DRAFTERS[settings.drafter](pair, warp)
            ratios = text_ratios(pair.target, propose, prompt, text, settings.gamma, warp)
            passes += expected_passes(ratios, SURVIVAL[settings.verify])
        expected = counts["new_tokens"] / passes
        predicted = expected_speedup(expected, counts["drafted"] / counts["passes"], c, v)
    return {**vars(settings), **counts, "c": c, "v": v,
            "eq1": eq1, "expected": expected, "predicted": predicted}


def print_rows(rows):
    """A table of one drafter, rule and temperature, and the best gamma."""
    plain = [row["plain_tokens_per_s"] for row in rows]  # each gamma beside a plain run of its own
    print("\n{drafter}, {verify} rule, temperature {temperature:g}: {new_tokens} new tokens, "
          "plain {slowest:.0f} to {fastest:.0f} tokens/s\n"
          "       tokens per pass   accepted              tokens  speedup\n"
          "gamma measured theory Eq. 1  /tested     c    v     /s theory  measured ({runs} runs)"
          .format(slowest=min(plain), fastest=max(plain), **rows[0]))
    for row in rows:
        theory = {key: "-" if row[key] is None else f"{row[key]:.2f}"
                  for key in ("expected", "eq1", "predicted")}
        print("{gamma:5}{tokens_per_pass:9.2f}{expected:>7}{eq1:>6}{alpha:9.3f}{c:6.3f}{v:5.2f}"
              "{speculative_tokens_per_s:7.0f}{predicted:>7}{speedup:6.2f} "
              "({speedup_min:.2f}-{speedup_max:.2f})".format(**row | theory))
    best = "best gamma: {gamma} ({speedup:.2f}x)".format(**max(rows, key=itemgetter("speedup")))
    if rows[0]["predicted"] is not None:
        foretold = max(rows, key=itemgetter("predicted"))
        best += "; by theory {gamma} ({predicted:.2f}x)".format(**foretold)
    print(best, flush=True)


# ---------------------------------------------------------------- the picture

def speedup_svg(rows):
    """Speedup against gamma as a picture, made of the pieces in bench_frame.svg: dots with their
    spread are measured, lines predicted. rows: dicts of `measure`, in the order of `bench`."""
    template = Path(__file__).with_name("bench_frame.svg").read_text(encoding="utf-8")
    frame, level, tick, dot, curve = template.split("\n\n")
    top = math.ceil(max(max(row["speedup_max"], row["predicted"] or 0) for row in rows))
    up = -300 / top  # the height of a speedup of 1, which is negative above the axis
    parts = [level.format(number, up * number) for number in range(top + 1)]
    x = {row["gamma"]: 70 * math.log2(row["gamma"]) for row in rows}  # 70 wide for each doubling
    parts += [tick.format(at, gamma) for gamma, at in x.items()]
    groups = groupby(rows, itemgetter("drafter", "verify", "temperature"))
    curves = sorted((list(group) for _, group in groups), key=lambda curve: -curve[-1]["speedup"])
    for i, of_one_way in enumerate(curves):
        dots = line = ""
        for row in of_one_way:
            spread = [up * row[key] for key in ("speedup_min", "speedup", "speedup_max")]
            dots += dot.format(x[row["gamma"]], *spread)
            if row["predicted"] is not None:
                line += f" {x[row['gamma']]:.1f},{up * row['predicted']:.1f}"
        name = html.escape("{drafter}, {verify} rule, T={temperature:g}".format(**of_one_way[0]))
        parts.append(curve.format(i % 5, line, dots, 22 * i - 280, name))
    return frame.replace("<!-- curves -->", "\n".join(parts))


# ---------------------------------------------------------------- command line

def about(pair):
    """Print and return what runs, and where."""
    print(f"on {pair.machine()}", flush=True)
    figures = {"machine": pair.machine(), "device": pair.target.device.type,
               "dtype": dtype_name(pair.target), "threads": torch.get_num_threads()}
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        figures[name] = {"parameters": sum(w.numel() for w in model.parameters()),
                         "dtype": dtype_name(model), "layers": model.config.n_layer,
                         "width": model.config.n_embd, "bits_per_byte": pair.bits_per_byte[name]}
        print(name + ": {parameters:,} parameters, {layers} layers of width {width}, "
              "{bits_per_byte:.3f} bits per byte".format(**figures[name]))
    return figures


def bench(pair, seed, now):
    """Print the tables and return every figure."""
    figures = {**about(pair), **bottleneck(pair.target, now), "rows": []}
    # Short prompts: to read them takes both ways as long, and it is decoding that is compared.
    prompts = [pair.encoding.encode_ordinary(prompt)[:16] for prompt in pair.prompts[:6]]
    # Where q is one-hot (temperature 0, lookup) the block rule is the token rule.
    groups = [("model", rule, 1.0) for rule in VERIFY]
    groups += [(name, "token", 1.0) for name in DRAFTERS if name != "model"]
    groups += [(name, "token", 0.0) for name in DRAFTERS]
    for drafter, verify, temperature in groups:
        settings = program.Settings(min(128, pair.target.config.context // 2), seed=seed,
                                    temperature=temperature, drafter=drafter, verify=verify)
        some = prompts if drafter == "model" else prompts[:2]
        rows = [measure(pair, some, replace(settings, gamma=gamma), now) for gamma in GAMMAS]
        print_rows(rows)
        figures["rows"] += rows
    # The first of them is of the draft model, the token rule and temperature 1.
    four = next(row for row in figures["rows"] if row["gamma"] == 4)
    return figures | {name: four[name] for name in ("alpha", "c", "v")}


def main(arguments=None):
    parser = program.decoding_parser("Time against theory.")
    parser.add_argument("--svg", metavar="FILE", help="draw speedup against gamma into FILE")
    options = parser.parse_args(arguments)
    with program.edges():
        pair = program.trained_pair(options)
        figures = bench(pair, options.seed, program.stopwatch(pair.target.device))
        program.write_json(options.json, figures)
        if options.svg:
            Path(options.svg).write_text(speedup_svg(figures["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
