"""The pictures of the README, from a trained pair and from the figures of bench.py.

    python docs/pictures.py [--checkpoint DIR] [--bench FILE]

FILE: what `python bench.py --json FILE` wrote. Colours and fixed words are in docs/templates.
"""

import argparse
import html
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from bench import laps, speedup_svg
from pair import CHECKPOINTS, load_pair, pick_device, pick_threads
from program import Settings, edges, stopwatch, visible
from specdec import decode_plain, decode_speculative
from vocabulary import speller


def picture(kind, **values):
    files = [DOCS / "templates" / name for name in (f"{kind}.svg", "style.css")]
    template, style = (file.read_text(encoding="utf-8") for file in files)
    return template.format(style=style, **values)


def short(words):
    words = visible(words).replace(" ", "␣")
    return html.escape(words if len(words) < 10 else words[:8] + "…")


def tail(text):
    lines = (line.lstrip() for line in text.split("\n"))
    return html.escape("…" + visible("⏎ ".join(lines))[-50:])


def timed(pair, tokens, settings, now):
    """Of plain and of speculative decoding, the steps and the second at which each is done: medians
    of five runs of both in turn, after one that warms up."""
    ways = decode_plain, decode_speculative
    runs = [[laps(way(pair, tokens, settings), now) for way in ways] for _ in range(6)][1:]
    for way in zip(*runs):
        each = map(statistics.median, zip(*(seconds for _, seconds in way)))
        yield way[0][0], list(itertools.accumulate(each))


def race_svg(ways, machine):
    """ways: plain and speculative, each (words, writer, second of its arrival) of every token."""
    ends = [way[-1][2] for way in ways]
    slower = max(1, round(10 / max(ends)))
    period = slower * max(ends) + 4  # then the whole text stands for four seconds
    (first, middle), (second, end) = (panel(way, slower, period) for way in ways)
    return picture("race", first=first, second=second, middle=middle + 170, end=middle + end + 294,
                   rates=[len(way) / way[-1][2] for way in ways], count=len(ways[0]), slower=slower,
                   machine=html.escape(machine))


def panel(tokens, slower, period):
    """The tokens of one way, each to appear at its time; and the height of their last line."""
    x, y, parts = 14, 0, []
    for words, writer, second in tokens:
        shown = "⏎" if words.startswith("\n") else visible(words)
        width = 11 * len(shown)
        if x + width > 710:
            x, y = 14, y + 32
        parts.append(picture("race_token", writer=writer, x=x, y=y, top=y - 20, width=width - 1,
                             words=html.escape(shown), period=period, at=slower * second / period))
        x += width
        if words.startswith("\n"):  # the next line starts behind its indentation
            x, y = 14 + 11 * (len(words) - 1), y + 32
    return "\n".join(parts), y


def example(pair):
    """The text before a round, and the round: of the held-out texts the first that drafts four
    tokens, accepts two and rejects the third, and that does not start its text."""
    for seed, prompt in itertools.product(range(50), pair.prompts):
        tokens = pair.encoding.encode_ordinary(prompt)
        for one in decode_speculative(pair, tokens, Settings(64, gamma=4, seed=seed)):
            if one.cache_before and (len(one.drafts), one.tested, one.accepted) == (4, 3, 2):
                return tokens, one
            tokens = tokens + one.new
    raise ValueError("this pair has no round to show: train it longer")


def round_svg(text, one, words):
    """text: ids before the round. words: of each id."""
    p, q = ([table[i, x].item() for i, x in enumerate(one.drafts)] for table in (one.p, one.q))
    last, correction, *x = (short(words[i]) for i in (text[-1], one.new[-1], *one.drafts))
    return picture("round", text=tail("".join(words[i] for i in text)), one=one, last=last, x=x,
                   p=p, q=q, accept=one.verdict.columns["min(1, p/q)"].tolist(),
                   correction=correction)


def position_svg(text, one, words):
    """p and q, as bars, at the place of the round where a draft was rejected and corrected."""
    n = one.accepted
    p, q, both = one.p[n], one.q[n], one.p[n].minimum(one.q[n])  # (V,)
    notes = {one.drafts[n]: "draft, rejected", one.new[n]: "correction"}
    ranked = p.maximum(q).argsort(descending=True).tolist()
    shown = [i for i in ranked if i in ranked[:6] or i in notes]
    groups = [[i] for i in shown] + [[i for i in ranked if i not in shown]]
    names = [short(words[i]) for i in shown] + ["all others"]
    sums = [[table[ids].sum().item() for table in (p, q, both)] for ids in groups]
    rows = [picture("position_row", y=44 * i, name=names[i], p=p_sum, q=q_sum, both=overlap,
                    above=p_sum - overlap, below=q_sum - overlap, scale=270 / max(map(max, sums)),
                    note=notes.get(groups[i][0], ""))
            for i, (p_sum, q_sum, overlap) in enumerate(sums)]
    return picture("position", text=tail("".join(words[i] for i in [*text, *one.new[:n]])),
                   rows="\n".join(rows), end=44 * len(rows) + 250, overlap=both.sum(),
                   above=(p - both).sum())


def draw(pair, now):
    """{name: SVG}, the three pictures that are made from the pair."""
    words = [speller(pair.encoding)(i, final=True) or "end of text"
             for i in range(pair.encoding.n_vocab)]
    tokens = pair.encoding.encode_ordinary(pair.prompts[0])
    (ids, at), (rounds, done) = timed(pair, tokens, Settings(80, pair.gamma), now)
    plain = [(words[i], "target", second) for i, second in zip(ids, at)]
    speculative = [(words[i], writer, second) for one, second in zip(rounds, done)
                   for i, writer in zip(one.new, one.writers)]
    text, one = example(pair)
    return {"race": race_svg([plain, speculative], pair.machine()),
            "round": round_svg(text, one, words), "position": position_svg(text, one, words)}


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Draw the pictures of the README.")
    parser.add_argument("--checkpoint", metavar="DIR", default=CHECKPOINTS / "tiny")
    parser.add_argument("--bench", metavar="FILE", help="draws speedup.svg from it")
    options = parser.parse_args(arguments)
    with edges():
        torch.set_num_threads(pick_threads())
        pair = load_pair(options.checkpoint, pick_device())
        pictures = draw(pair, stopwatch(pair.target.device))
        if options.bench:
            figures = json.loads(Path(options.bench).read_text(encoding="utf-8"))
            pictures["speedup"] = speedup_svg(figures["rows"])
        for name, svg in pictures.items():
            (DOCS / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
