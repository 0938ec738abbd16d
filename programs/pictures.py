"""The pictures of the README and the page docs/law.html, all from one pair at work.

    python -m programs.pictures checkpoints/tiny
"""

import html
import string
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from programs.bench import measure, typical
from programs.decode import stopwatch
from programs.options import clear_errors, parser_of, prepared
from programs.trace import page, trace

DOCS = Path(__file__).parent.parent / "docs"
PIECES = Path(__file__).with_suffix(".svg").read_text(encoding="utf-8").split("<!-- ")[1:]
PIECES = dict(piece.split(" -->\n") for piece in PIECES)  # pictures are put together from these


class Svg(string.Formatter):
    def format_field(self, value, spec):
        """A list holds pieces. All else is text, and stays text."""
        return "".join(value) if isinstance(value, list) else html.escape(format(value, spec))


def piece(kind, name="", **values):
    """A piece with values in it. A character of a name is 11 wide."""
    return Svg().format(PIECES[kind], name=name, wide=11 * len(name), **values)


def picture(kind, data, height, **values):
    body = [piece(kind, **values)]
    return piece("frame", data["machine"], pair=data.get("pair", ""), height=height, body=body)


# ---------------------------------------------------------------- time, to scale

def bars_of(plain, rounds):
    """(kind, height of the lane, from, to, new tokens) of passes and draft steps, in seconds."""
    bars, end = [("pass", 76, end - took, end, 1) for took, end in zip(plain, accumulate(plain))], 0
    for one in rounds:
        (drafting, whole), k, start = one["seconds"], len(one["drafts"]), end
        end = start + whole
        bars += [("step", 150, start + drafting * i / k, start + drafting * (i + 1) / k, 0)
                 for i in range(k)]
        bars.append(("pass", 150, start + drafting, end, len(one["new"])))
    return bars


def timeline_svg(data):
    """Both ways from when the prompt is read; below each round the tokens that it brought."""
    plain, rounds, step = data["plain"][1:], data["rounds"][1:], typical(data["plain"])
    span = min((m * 10 ** k for k in range(-3, 1) for m in (1, 1.5, 2, 3, 4, 5, 6, 8)),
               key=lambda span: abs(span - 7.5 * step))  # a round number, of 6 to 9 plain steps
    bars, x = bars_of(plain, rounds), 380 / span  # x: the width of a second
    parts = [piece(kind if end <= span else "cut", str(new), x=10 + x * start, y=y,
                   width=x * (min(end, span) - start))
             for kind, y, start, end, new in bars if start < span]
    took = [one["seconds"][1] for one in data["rounds"]]
    parts += [piece(of["writer"], of["name"].rstrip("·")[:int(x * whole / 11)],
                    x=10 + x * (end - whole), y=244 + 26 * i)
              for one, whole, end in zip(rounds, took[1:], accumulate(took[1:]))
              for i, of in enumerate(one["new"]) if end <= span]
    alone, came = (sum(new for _, y, _, end, new in bars if y == lane and end <= span)
                   for lane in (76, 150))
    brought, cost = sum(len(one["new"]) for one in rounds) / len(rounds), typical(took) / step
    gamma = data["settings"]["gamma"]
    return picture("timeline", data, 430 + 26 * gamma, parts=parts, ms=1000 * span, alone=alone,
                   half=500 * span, came=came, gamma=gamma, cost=cost, brought=brought,
                   ratio=brought / cost, down=280 + 26 * gamma)


def race_svg(data):
    """One text both ways, each token at its time, and its part of a bar of time."""
    rounds = [(one["seconds"][1], one["new"]) for one in data["rounds"]]
    text = [of | {"writer": "p"} for _, new in rounds for of in new]
    steps = [(took, [of]) for took, of in zip(data["plain"], text)]
    last = max(sum(took for took, _ in way) for way in (steps, rounds))
    slower = max(1, round(8 / last))
    period = slower * last + 4  # at the end all stands for 4 seconds

    def appear(second, *parts):
        return piece("appear", parts=[*parts], period=period, at=slower * second / period)

    parts, y = [appear(last * i / 40, piece("clock", f"{1000 * last * i / 40:.0f} ms"))
                for i in range(41)], 92
    for name, way in (("plain", steps), ("speculative", rounds)):
        written, bottom = lane_of(way, y, 500 / last, appear)
        parts += [piece("way", name, y=y), *written]
        y = bottom + 50
    return picture("race", data, y + 20, parts=parts, slower=slower, count=len(text))


def lane_of(way, top, width, appear):
    """Text, bar and flag of (seconds, new tokens), and where they end. width: of a second."""
    parts, x, y, end = [], 10, top + 52, 0
    for took, new in way:
        start, end = end, end + took
        for i, of in enumerate(new):
            name = of["name"].rstrip("·") or "·"  # no indentation after a line break
            x, y = (x, y) if x + 11 * len(name) < 510 else (10, y + 30)
            bar = piece(of["writer"] + "_bar", x=10 + width * (start + took * i / len(new)),
                        y=top + 10, width=width * took / len(new))
            parts.append(appear(end, bar, piece(of["writer"], name, x=x, y=y)))
            x += 11 * len(name) + 4
    return [*parts, appear(end, piece("flag", f"{1000 * end:.0f} ms", y=top))], y


# ---------------------------------------------------------------- one place

def position_svg(data, row, before):
    """p and q at one place, as bars. before: the text before it."""
    *items, others = row
    scale, both = 320 / max(max(of["p"], of["q"]) for of in items), sum(of["both"] for of in row)
    rows = [piece(of["mark"] or "mono", of["name"][:9], x=10, y=100 + 38 * i)
            + piece("place", y=80 + 38 * i, **{key: scale * of[key] for key in ("p", "q", "both")})
            for i, of in enumerate(items)]
    return picture("position", data, 294 + 38 * len(items), rows=rows, others=others, both=both,
                   rest=1 - both, down=110 + 38 * len(items), before=before)


# ---------------------------------------------------------------- what is drawn

def drawn(pair, settings, tokens):
    """{name of the file: its text} of all that is drawn from the pair."""
    prompts = [pair.encoding.encode_ordinary(prompt)[:16] for prompt in pair.prompts]
    data = trace(pair, tokens, settings)[1]
    rounds = data["rounds"]
    # Of four drafts two stand. p and q of the third are instructive: about .6 in common, and many
    # tokens that are likely.
    rows = {k: one["rows"][2] for k, one in enumerate(rounds)
            if k and (len(one["drafts"]), one["accepted"]) == (4, 2)}
    k = min(rows, key=lambda k: abs(sum(of["both"] for of in rows[k]) - 0.6)
            + sum(of["p"] ** 2 for of in rows[k]))
    names = [of["name"] for one in rounds[:k] for of in one["new"]]
    place = "".join([*names, *(of["name"] for of in rounds[k]["new"][:2])])[-43:]
    law = {"pair": data["pair"], "machine": data["machine"], "items": rows[k], "text": place,
           "measured": measure(pair, prompts[:3], settings, stopwatch(pair.target.device))}
    cold = greedy(pair, settings, prompts)
    return {"timeline.svg": timeline_svg(data), "position.svg": position_svg(data, rows[k], place),
            "law.html": page("law.html", law), "race.svg": race_svg(cold)}


def greedy(pair, settings, prompts):
    """A text at temperature 0 that both ways write alike, for rounding may part them; and of these
    the one that repeats itself least, for many are loops."""
    settings = replace(settings, temperature=0, max_new=40)
    texts = [trace(pair, tokens, settings)[1] for tokens in prompts]
    alike = [data for data in texts
             if data["ids"] == [of["id"] for one in data["rounds"] for of in one["new"]]]
    return max(alike, key=lambda data: len(set(data["ids"])))


def main(arguments=None):
    parser = parser_of("Draw the pictures of the README.", arguments, prompt=False)
    parser.add_argument("checkpoint", metavar="DIR", help="a pair of train_tiny.py")
    parser.set_defaults(gamma=4)
    options = parser.parse_args(arguments)
    with clear_errors(parser):
        for name, text in drawn(*prepared(options)).items():
            (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
