"""A text told round by round, on the terminal or as a page to lecture from.

`tell` makes plain values of what happened, probabilities rounded. Both ways show only these.
"""

import inspect
import json
import textwrap
from pathlib import Path

import torch

import program
from sampling import VERIFY
from specdec import DRAFTERS, DraftModel, decode_speculative
from vocabulary import speller


# ---------------------------------------------------------------- what happened, as plain values

def watched(pair, tokens, settings):
    """Yields each round, and {whose cache: tokens in it before, when fed, after the rollback}."""
    propose, held = DRAFTERS[settings.drafter](pair, settings.warp()), 0
    for one in decode_speculative(pair, tokens, settings, pair.encoding.eot_token, propose):
        caches = {"target": [one.cache_before, one.cache_fed, one.cache_kept]}
        if isinstance(propose, DraftModel):  # it rolls its cache back when it drafts next
            fed = propose.cache.length
            kept = min(fed, one.cache_kept)
            caches["draft"], held = [held, fed, kept], kept
        yield one, caches


def tell(tokens, rounds, encoding, settings):
    """All that is shown of a text. tokens: the prompt's. rounds: as `watched` yields them."""
    spell, done = speller(encoding), []
    # The rule is explained by the first paragraph of its docstring, if it has one.
    rule = VERIFY[settings.verify]
    says = (inspect.isfunction(rule) and inspect.getdoc(rule) or "").split("\n\n")[0]

    def told(ids, writers):
        return [{"id": x, "name": name_of(x, encoding), "writer": writer,
                 "text": program.visible(spell(x), lines=True)} for x, writer in zip(ids, writers)]

    data = {"settings": vars(settings), "rule": says.replace("\n", " "),
            "prompt": told(tokens, ["prompt"] * len(tokens)), "rounds": []}
    for one, caches in rounds:
        done.append(one)
        data["rounds"].append({
            "accepted": one.accepted, "one_by_one": one.verdict.one_by_one,
            "drafts": tell_drafts(one, encoding), "next": tell_next(one, encoding),
            "new": told(one.new, one.writers), "caches": caches, "score": program.tally(done)})
    if done:  # the text may end inside of a character
        data["rounds"][-1]["new"][-1]["text"] += spell(encoding.eot_token, final=True)
    return data


def name_of(token, encoding):
    """A token by itself: a dot for a space, a sign for a line break, \\xNN for half a character."""
    text = encoding.decode_single_token_bytes(token).decode("utf-8", "backslashreplace")
    return program.visible(text).replace(" ", "·")


def rounded(numbers):
    """In three significant digits, so that small ones can be compared. 0 and 1 are exactly that."""
    return [f"{x:.0f}" if x in (0, 1) else f"{x:#.3g}" for x in map(float, numbers)]


def tell_drafts(one, encoding):
    """The drafts as a table {title: cells}: p and q, what the rule says of each, and its end."""
    n, count, one_by_one = one.accepted, len(one.drafts), one.verdict.one_by_one
    columns = {"q(x)": [one.q[i, x] for i, x in enumerate(one.drafts)],
               "p(x)": [one.p[i, x] for i, x in enumerate(one.drafts)], **one.verdict.columns}
    cells = {title: rounded(column) for title, column in columns.items()}
    if one_by_one and "coin" in cells:  # coins behind the first 0 do not count
        cells["coin"][one.tested:] = ["-"] * (count - one.tested)
    behind = ["rejected"] + ["not tested" if one_by_one else "dropped"] * count
    if one.writers[-1] == "draft":
        behind = ["after the end"] * count
    return {"draft": [name_of(x, encoding) for x in one.drafts], **cells,
            "verdict": ["accepted"] * n + behind[:count - n]}


def tell_next(one, encoding):
    """What the correction or bonus was drawn from, as a table: the likeliest tokens, the drawn one
    and the rejected draft, and all others in one row. Empty where a draft ended the text."""
    n, writer = one.accepted, one.writers[-1]
    if writer == "draft":
        return {}
    columns = {"p": one.p[n]}  # each (V,)
    if writer == "correction":
        columns |= {"q": one.q[n], **left_of(one)}
    if one.verdict.drawn_from is not None:
        columns["drawn from"] = one.verdict.drawn_from
    shown = {one.new[-1], *one.drafts[n:n + 1]}
    for probs in columns.values():
        shown |= {i for i in probs.topk(min(3, len(probs))).indices.tolist() if probs[i] > 0}
    ids = sorted(shown, key=lambda i: -one.p[n, i].item())
    others = [i for i in range(len(one.p[n])) if i not in shown]
    cells = {title: rounded([*probs[ids], probs[others].sum()]) for title, probs in columns.items()}
    return {"next": [name_of(i, encoding) for i in ids] + ["all others"], **cells,
            "drawn": [writer if i == one.new[-1] else "" for i in ids] + [""]}


def left_of(one):
    """{"left": what stands of p above q}, if that is what the correction was drawn from. The block
    rule compares q with keep·p, keep being that of the last draft that stands."""
    n, keeps, drawn_from = one.accepted, one.verdict.columns.get("keep"), one.verdict.drawn_from
    keep = 1 if n == 0 or keeps is None else keeps[n - 1]
    left = (keep * one.p[n] - one.q[n]).clamp(min=0)  # (V,)
    if drawn_from is None or not torch.allclose(left, left.sum() * drawn_from, atol=1e-6):
        return {}
    return {"left": left}


# ---------------------------------------------------------------- on the terminal, and as a page

def as_text(data):
    """Yields what the rule says of itself, then each round, in lines for a terminal."""
    if data["rule"]:
        yield textwrap.fill(data["rule"], 80) + "\n"
    text = "".join(token["text"] for token in data["prompt"])
    for number, one in enumerate(data["rounds"], 1):
        drafts, writer = one["drafts"]["draft"], one["new"][-1]["writer"]
        end = "which ends the text" if writer == "draft" else f"then a {writer}"
        lines = [f"round {number}: {len(drafts)} drafted, {one['accepted']} accepted, {end}",
                 "  …" + program.visible(text)[-40:], *table(one["drafts"]), *table(one["next"])]
        lines += ["  {}'s cache: {} tokens, {} after feeding, {} after the rollback"
                  .format(name, *held) for name, held in one["caches"].items()]
        lines.append("  so far: {new_tokens} tokens in {passes} target passes, "
                     "{tokens_per_pass:.2f} a pass, {accepted}/{tested} accepted/tested"
                     .format(**one["score"]))
        yield "\n".join([*lines, ""])
        text += "".join(token["text"] for token in one["new"])


def table(cells):
    """Lines: the titles, and under them the rows, if any, in the colours of their last cells."""
    rows = list(zip(*([title, *column] for title, column in cells.items())))
    if len(rows) < 2:
        return []
    widths = [max(map(len, column)) for column in zip(*rows)]
    colours = {"accepted": "draft", "rejected": "correction"}
    return [program.coloured("  " + "  ".join(map(str.ljust, row, widths)).rstrip(),
                             colours.get(row[-1], row[-1])) for row in rows]


def page(data):
    """trace.html with the data in it."""
    source = Path(__file__).with_name("trace.html").read_text(encoding="utf-8")
    values = json.dumps(data).replace("<", "\\u003c")  # no token can end the script element
    return source.replace("{{data}}", values)


def main(arguments=None):
    parser = program.decoding_parser("Tell how a text is written, round by round.", DRAFTERS)
    parser.add_argument("--html", metavar="FILE", help="write a page to FILE instead")
    options = parser.parse_args(arguments)
    with program.edges():
        pair, settings, tokens = program.prepared(options)
        rounds = list(watched(pair, tokens, settings))
        data = tell(tokens, rounds, pair.encoding, settings)
        if options.html:
            Path(options.html).write_text(page(data), encoding="utf-8")
            print(f"wrote {program.visible(options.html)}: open it in a browser")
        else:
            print(*as_text(data), sep="\n")
        done = [one for one, _ in rounds]
        program.write_json(options.json, {**program.tally(done), "rounds": done})


if __name__ == "__main__":
    main()
