"""Time against theory: what a step costs, how many tokens a pass brings, and the speedup of both.

    python bench.py                  the tables, in some minutes
    python bench.py --svg FILE       and a picture of speedup against gamma

The letters alpha, c and v are explained at the top of sampling.py. A rule or a drafter of your own
is measured too, once it is in sampling.VERIFY or specdec.DRAFTERS.
"""

import argparse
import html
import math
import statistics
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

import program
from pair import dtype_name
from sampling import VERIFY, check_seed
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
    """P(at least i drafts stood | the text), i = 0, 1, ..., from q(y) / p(y) of the tokens y there.

    A token y is drafted and stands with probability min(p(y), q(y)), and it comes with p(y): once
    there, it came as a draft with probability min(1, q(y) / p(y)).
    """
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
    passes = [0.0] * (total + 1)  # from t on
    for t in reversed(range(total)):
        stand = survival(q_over_p[t][:total - t - 1]) + [0.0]
        ends = [stand[i] - stand[i + 1] for i in range(len(stand) - 1)]  # P(i drafts accepted)
        passes[t] = 1 + sum(chance * passes[t + i + 1] for i, chance in enumerate(ends))
    return passes[0]


@torch.inference_mode()
def text_ratios(target, propose, prompt, text, gamma, warp):
    """q_over_p of a text. The drafter itself is asked at each place, by a choose that makes it
    draft what the text goes on with."""
    tokens, start, device = prompt + text, len(prompt), target.device
    p = warp(target(torch.tensor([tokens[:-1]], device=device))[0, start - 1:])  # (N, V)
    p = p.gather(-1, torch.tensor(text, device=device)[:, None])[:, 0].clamp(min=1e-30).tolist()
    ratios = []
    for t in range(len(text)):
        coming = iter(text[t:])
        _, q = propose(tokens[:start + t], min(gamma, len(text) - t - 1),
                       lambda probs: torch.tensor([next(coming)], device=device))  # (γ, V)
        ratios.append([row[y].item() / p_of_y for row, y, p_of_y in zip(q, text[t:], p[t:])])
    return ratios


# ---------------------------------------------------------------- what a step costs

def laps(steps, now):
    """What a generator gives, and the seconds that it took to give each."""
    given, times = [], [now()]
    for one in steps:
        given.append(one)
        times.append(now())
    return given, np.diff(times).tolist()


def typical(seconds):
    """The median, without the first where there are others: it reads the prompt, or warms up."""
    return statistics.median(seconds[1:] or seconds)


def step_costs(pair, tokens, each, now):
    """(c, v) of each settings. A text is decoded both ways with the clock inside of the loop.

    A plain step is a pass over one row, the draw and the read. A round is its drafts, and a pass
    over γ+1 rows, the rule and the read.
    """
    step, costs = typical(laps(decode_plain(pair, tokens, each[0]), now)[1]), []
    for settings in each:
        drafter, drafting = DRAFTERS[settings.drafter](pair, settings.warp()), []

        def propose(*arguments):
            began = now()
            drafts = drafter(*arguments)
            drafting.append(now() - began)
            return drafts

        rounds, whole = laps(decode_speculative(pair, tokens, settings, propose=propose), now)
        draft = typical([took / max(1, len(one.drafts)) for took, one in zip(drafting, rounds)])
        wide_pass = typical([took - drafted for took, drafted in zip(whole, drafting)])
        costs.append((draft / step, wide_pass / step))
    return costs


# ---------------------------------------------------------------- measured beside predicted

def measure(pair, prompts, settings, now, gammas=GAMMAS):
    """The figures of one drafter, rule and temperature: a dict for each gamma.

    c and v come from runs of their own, which also warm up. Then plain decoding and all gammas run
    in turn with the clock outside, past an end of text, so that all do the same work.
    """
    plain_new, costs, runs, seconds = 0, [], [], []  # the lists: of each prompt, of each gamma
    for i, tokens in enumerate(prompts):
        # Each prompt has a seed of its own; ^ stays within the range of seeds.
        each = [replace(settings, gamma=gamma, seed=settings.seed ^ i) for gamma in gammas]
        costs.append(step_costs(pair, tokens, each, now))
        ways = [partial(decode_plain, pair, tokens, each[0])]
        ways += [partial(decode_speculative, pair, tokens, one) for one in each]
        (ids, *rounds), taken = program.race(ways, now)
        plain_new += len(ids)
        runs.append(rounds)
        seconds.append(taken)
    plain_seconds, *seconds = np.sum(seconds, axis=0).tolist()  # (1 + gammas, repeats)
    return [against_theory(pair, prompts, replace(settings, gamma=gamma),
                           [run[i] for run in runs], [cost[i] for cost in costs])
            | {"plain_new_tokens": plain_new, **program.rates(plain_new, plain_seconds, seconds[i])}
            for i, gamma in enumerate(gammas)]


def against_theory(pair, prompts, settings, runs, costs):
    """The counts of one gamma, and what theory makes of them. runs: the rounds of each prompt.

    "expected" is tokens per pass from the acceptance of each token, "predicted" the speedup that
    follows; None for a rule or a drafter of which theory knows nothing. "eq1" is tokens per pass by
    Equation 1, as if acceptances were i.i.d. and the rule the token rule.
    """
    rounds, warp = [one for run in runs for one in run], settings.warp()
    counts = program.tally(rounds)
    c, v = map(statistics.median, zip(*costs))
    expected = predicted = None
    if settings.verify in SURVIVAL and settings.drafter in ("model", "lookup"):
        passes = 0
        for prompt, run in zip(prompts, runs):
            text = [y for one in run for y in one.new]
            propose = DRAFTERS[settings.drafter](pair, warp)
            ratios = text_ratios(pair.target, propose, prompt, text, settings.gamma, warp)
            passes += expected_passes(ratios, SURVIVAL[settings.verify])
        expected = counts["new_tokens"] / passes
        predicted = expected_speedup(expected, counts["drafted"] / counts["passes"], c, v)
    eq1 = statistics.mean(expected_tokens(counts["alpha"], len(one.drafts)) for one in rounds)
    return {"drafter": settings.drafter, "verify": settings.verify, "gamma": settings.gamma,
            "temperature": settings.temperature, **counts, "eq1": eq1, "c": c, "v": v,
            "expected": expected, "predicted": predicted}


def print_rows(rows):
    """A table of one drafter, rule and temperature, and the best gamma."""
    print("\n{drafter}, {verify} rule, temperature {temperature:g}: {new_tokens} new tokens, "
          "plain {plain_tokens_per_s:.0f} tokens/s\n"
          "       tokens per pass   accepted              tokens  speedup\n"
          "gamma measured theory Eq. 1  /tested     c    v     /s theory  measured (3 runs)"
          .format(**rows[0]))
    for row in rows:
        eq1 = row["eq1"] if row["verify"] == "token" else None
        known = ("-" if x is None else f"{x:.2f}" for x in (row["expected"], eq1, row["predicted"]))
        print("{gamma:5}{tokens_per_pass:9.2f}{:>7}{:>6}{alpha:9.3f}{c:6.3f}{v:5.2f}"
              "{speculative_tokens_per_s:7.0f}{:>7}{speedup:6.2f} "
              "({speedup_min:.2f}-{speedup_max:.2f})".format(*known, **row))
    best, note = max(rows, key=lambda row: row["speedup"]), ""
    if best["predicted"] is not None:
        foretold = max(rows, key=lambda row: row["predicted"])
        note = "; by theory {gamma} ({predicted:.2f}x)".format(**foretold)
        note += f"; measured/predicted {best['speedup'] / best['predicted']:.2f}"
    print("best gamma: {gamma} ({speedup:.2f}x)".format(**best) + note, flush=True)


def about(pair):
    """Print and return what runs, and where."""
    print(f"on {pair.machine()}", flush=True)
    figures = {"device": pair.machine().split(",")[0], "dtype": dtype_name(pair.target),
               "threads": torch.get_num_threads()}
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
    half = pair.target.config.context // 2
    # Short prompts: to read them takes both ways as long, and it is decoding that is compared.
    prompts = [pair.encoding.encode_ordinary(prompt)[:min(16, half)] for prompt in pair.prompts[:6]]
    groups = [("model", rule, 1.0) for rule in VERIFY]
    groups += [(name, "token", 1.0) for name in DRAFTERS if name != "model"]
    groups += [(name, "token", 0.0) for name in DRAFTERS]
    for drafter, verify, temperature in groups:
        settings = program.Settings(min(128, half), temperature=temperature, seed=seed,
                                    drafter=drafter, verify=verify)
        rows = measure(pair, prompts if drafter == "model" else prompts[:2], settings, now)
        print_rows(rows)
        figures["rows"] += rows
        if (drafter, verify, temperature) == ("model", "token", 1.0):
            figures |= {name: rows[GAMMAS.index(4)][name] for name in ("alpha", "c", "v")}
    print("\nWhere q is one-hot (temperature 0, lookup) the block rule is the token rule.")
    return figures


# ---------------------------------------------------------------- the bottleneck

def bottleneck(target, now):
    """Time of a target pass against the rows that it carries, and the tokens cached before it."""
    array = torch.ones(2 ** 27, device=target.device)  # half a gigabyte, larger than most caches
    _, (seconds,) = program.race([partial(array.sum, 0, keepdim=True)], now, repeats=7)
    rate = array.numel() * array.element_size() / typical(seconds) / 1e9
    weights = [w for w in target.parameters() if w is not target.embed]  # that is read by the row
    moved, context = sum(w.numel() * w.element_size() for w in weights) / 1e6, target.config.context
    quarter = max(1, context // 4)
    counts = [rows for rows in (1, 2, 4, 8, 16) if rows <= quarter]
    lengths = (0, quarter, 2 * quarter, 3 * quarter, context - 1)
    shapes = [(rows, quarter) for rows in counts] + [(1, cached) for cached in lengths]
    passes = [partial(one_pass, target, target.new_cache(), *shape) for shape in shapes]
    _, seconds = program.race(passes, now, repeats=60)
    ms = {shape: 1000 * typical(taken) for shape, taken in zip(shapes, seconds)}
    by_rows = {rows: ms[rows, quarter] for rows in counts}
    by_length = {cached: ms[1, cached] for cached in lengths}
    print(f"\nA target pass reads {moved:.1f} MB of weights, however many its rows. At the rate\n"
          f"of the sum of a large array, {rate:.1f} GB/s here, that takes {moved / rate:.2f} ms.")
    for title, table in ((f"rows, {quarter} cached", by_rows), ("cached, 1 row", by_length)):
        for number, taken in table.items():
            ratio = taken / by_rows[1]
            print(f"{number:4} {title:16}{taken:9.2f} ms {ratio:6.2f}  " + "█" * round(10 * ratio))
    return {"memory_gb_per_s": rate, "pass_ms": by_rows, "pass_ms_by_length": by_length}


@torch.inference_mode()
def one_pass(target, cache, rows, cached):
    """A pass over so many rows behind so many tokens. The first time it fills the cache, too."""
    cache.length = min(cached, cache.length)
    fed = cached + rows - cache.length
    return target(torch.zeros(1, fed, dtype=torch.long, device=target.device), cache, rows)


# ---------------------------------------------------------------- the picture

def speedup_svg(rows):
    """Speedup against gamma as a picture: dots with their spread are measured, lines predicted. Its
    frame and colours are in bench_frame.svg. rows: of one or more calls of `measure`."""
    curves, parts, below = {}, [], 0
    for row in rows:
        curves.setdefault((row["drafter"], row["verify"], row["temperature"]), []).append(row)
    top = math.ceil(max(max(row["speedup_max"], row["predicted"] or 0) for row in rows))

    def place(gamma, speedup):
        return round(34 + 70 * math.log2(gamma), 1), round(360 - 300 * speedup / top, 1)

    for level in range(top + 1):
        x, y = place(1, level)
        parts.append(f'<line x1="{x}" x2="320" y1="{y}" y2="{y}"/>'
                     f'<text x="26" y="{y + 5}" class="level">{level}x</text>')
    for gamma in GAMMAS:
        parts.append(f'<text x="{place(gamma, 0)[0]}" y="382" class="gamma">{gamma}</text>')
    for i, curve in enumerate(sorted(curves.values(), key=lambda curve: -curve[-1]["speedup"])):
        # A name stands at the end of its curve, or under the name before it.
        below = max(below + 40, place(1, curve[-1]["speedup"])[1])
        parts.append(f'<g class="s{i % 5}">{svg_curve(curve, place, below)}</g>')
    frame = Path(__file__).with_name("bench_frame.svg").read_text(encoding="utf-8")
    return (frame.replace("470 412", f"470 {max(412, below + 30)}")
            .replace("<!-- curves -->", "\n".join(parts)))


def svg_curve(curve, place, below):
    """The rows of one drafter, rule and temperature: a line, dots with their spread, a name."""
    parts, best = [], max(curve, key=lambda row: row["speedup"])
    if best["predicted"] is not None:
        points = " ".join("{},{}".format(*place(row["gamma"], row["predicted"])) for row in curve)
        parts.append(f'<polyline points="{points}"/>')
    for row in curve:
        (x, least), (_, y), (_, most) = (place(row["gamma"], row[key])
                                         for key in ("speedup_min", "speedup", "speedup_max"))
        parts.append(f'<line x1="{x}" x2="{x}" y1="{least}" y2="{most}"/>'
                     f'<circle cx="{x}" cy="{y}" r="4"/>')
    name = html.escape(best["verify"] + " rule" if best["drafter"] == "model" else best["drafter"])
    parts.append('<text x="330" y="{}">{}, T={temperature:g}</text><text x="330" y="{}">'
                 "{speedup:.2f}x at γ {gamma}</text>".format(below, name, below + 18, **best))
    return "".join(parts)


# ---------------------------------------------------------------- command line

def main(arguments=None):
    parser = argparse.ArgumentParser(description="Time against theory.")
    program.add_pair_options(parser)
    parser.add_argument("--svg", metavar="FILE", help="draw speedup against gamma into FILE")
    options = parser.parse_args(arguments)
    with program.edges():
        check_seed(options.seed)
        if options.svg:
            program.check_writable(options.svg)
        pair = program.trained_pair(options)
        figures = bench(pair, options.seed, program.stopwatch(pair.target.device))
        if options.json:
            program.write_json(options.json, figures)
        if options.svg:
            Path(options.svg).write_text(speedup_svg(figures["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
