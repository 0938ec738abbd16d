"""Race, round and position: the pictures of the README that show a pair at work.

    python -m docs.pictures checkpoints/base     (colours and fixed words are in docs/templates)
"""

import argparse
import html
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench import laps
from pair import load_pair, pick_threads
from program import Settings, edges, stopwatch, visible
from specdec import decode_plain, decode_speculative
from vocabulary import speller

DOCS = Path(__file__).parent


def picture(kind, **values):
    template, style = ((DOCS / "templates" / name).read_text(encoding="utf-8")
                       for name in (f"{kind}.svg", "style.css"))
    return template.format(style=style, **values)


def short(words):
    words = visible(words).replace(" ", "␣")
    return html.escape(words if len(words) < 10 else words[:8] + "…")


def tail(ids, words):
    return html.escape("…" + visible("".join(words[i] for i in ids))[-50:])


def timed(ways, now):
    """What each way gives, and the second at which each is done: medians of five runs in turn."""
    runs = [[laps(way(), now) for way in ways] for _ in range(6)][1:]  # the first warms up
    return [(way[0][0], np.median([np.cumsum(seconds) for _, seconds in way], axis=0).tolist())
            for way in zip(*runs)]


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


def example(pair, tokens):
    """The text before a round, not its first, and the round: of four drafts two are accepted."""
    for seed in range(400):
        text = tokens
        for one in decode_speculative(pair, text, Settings(64, gamma=4, seed=seed)):
            if one.cache_before and (len(one.drafts), one.tested, one.accepted) == (4, 3, 2):
                return text, one
            text = text + one.new
    raise ValueError("this pair has no round to show: train it longer")


def round_svg(text, one, words):
    """text: ids before the round. words: of each id."""
    last, correction, *x = (short(words[i]) for i in (text[-1], one.new[-1], *one.drafts))
    p, q = (table[range(4), one.drafts] for table in (one.p, one.q))  # (4,)
    return picture("round", text=tail(text, words), one=one, last=last, x=x, p=p, q=q,
                   accept=one.verdict.columns["chance"], correction=correction)


def position_svg(text, one, words):
    """p and q, as bars, at the place of the round where a draft was rejected and corrected."""
    n = one.accepted
    p, q, both = one.p[n], one.q[n], one.p[n].minimum(one.q[n])  # (V,)
    notes = {one.drafts[n]: "draft, rejected", one.new[n]: "correction"}
    ranked = p.maximum(q).argsort(descending=True).tolist()
    shown = [i for i in ranked if i in ranked[:6] or i in notes]
    others = [i for i in ranked if i not in shown]
    rows = [(short(words[i]), notes.get(i, ""), [i]) for i in shown] + [("all others", "", others)]
    scale = 270 / max(table[ids].sum().item() for table in (p, q) for _, _, ids in rows)
    bars = [picture("position_row", y=44 * i, name=name, note=note, scale=scale, p=p[ids].sum(),
                    q=q[ids].sum(), both=both[ids].sum(), above=(p - both)[ids].sum(),
                    below=(q - both)[ids].sum()) for i, (name, note, ids) in enumerate(rows)]
    return picture("position", text=tail([*text, *one.new[:n]], words), rows="\n".join(bars),
                   end=44 * len(bars) + 250, overlap=both.sum(), above=(p - both).sum())


def draw(pair, now):
    """{name: SVG}, the three pictures that are made from the pair."""
    words = [speller(pair.encoding)(i, final=True) or "end of text"
             for i in range(pair.encoding.n_vocab)]
    tokens = pair.encoding.encode_ordinary(pair.prompts[0])
    settings = Settings(max_new=80, gamma=pair.gamma)
    ways = [partial(way, pair, tokens, settings) for way in (decode_plain, decode_speculative)]
    (ids, at), (rounds, done) = timed(ways, now)
    plain = [(words[i], "target", second) for i, second in zip(ids, at)]
    speculative = [(words[i], writer, second) for one, second in zip(rounds, done)
                   for i, writer in zip(one.new, one.writers)]
    text, one = example(pair, tokens)
    return {"race": race_svg([plain, speculative], pair.machine()),
            "round": round_svg(text, one, words), "position": position_svg(text, one, words)}


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Draw the pictures of the README.")
    parser.add_argument("checkpoint", metavar="DIR", help="a pair of train_tiny.py")
    with edges():
        torch.set_num_threads(pick_threads())
        pair = load_pair(parser.parse_args(arguments).checkpoint)
        for name, svg in draw(pair, stopwatch(pair.target.device)).items():
            (DOCS / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
