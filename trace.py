"""A text told round by round, on the terminal or as a page to lecture from.

`tell` makes plain values of what happened, with the numbers rounded. Both ways show only these.
"""

import json
import secrets
import textwrap
import unicodedata
from pathlib import Path

import torch

import program
from sampling import VERIFY, verify_block, verify_token
from specdec import DRAFTERS, DraftModel, decode_speculative
from vocabulary import speller

# Which column is the chance of a coin, and how the coins decide. Of other rules nothing is known.
KNOWN = {
    verify_token: ("min(1, p/q)", "min(1, p/q): the chance that a draft's coin comes up 1. The "
                   "first draft whose coin is 0 is rejected, and those behind it are not tested. "
                   "A correction is drawn from left = max(0, p - q), divided by its sum."),
    verify_block: ("h", "keep: the probability that a draft and all before it stand. h: the chance "
                   "that its coin comes up 1, the probability that just so many drafts stand if no "
                   "more do. The largest i whose coin is 1 decides: i drafts stand. A correction "
                   "is drawn from left = max(0, keep·p - q), divided by its sum, with that keep."),
}


# ---------------------------------------------------------------- what happened, as plain values

def watched(pair, tokens, settings):
    """Yields each round, and {whose cache: tokens in it before, when fed, after the rollback}."""
    propose = DRAFTERS[settings.drafter](pair, settings.warp())
    held, length = 0, len(tokens)
    for one in decode_speculative(pair, tokens, settings, pair.encoding.eot_token, propose):
        length += len(one.new)
        caches = {"target": [one.cache_before, one.cache_fed, one.cache_kept]}
        if isinstance(propose, DraftModel):  # it rolls its cache back when it drafts next
            fed = propose.cache.length
            caches["draft"] = [held, fed, min(fed, length - 1)]
            held = caches["draft"][2]
        yield one, caches


def tell(tokens, rounds, encoding, settings):
    """All that is shown of a text. tokens: the prompt's. rounds: as `watched` yields them."""
    spell, done = speller(encoding), []
    chance, says = KNOWN.get(VERIFY[settings.verify], ("", ""))

    def told(ids, writers):
        return [{"id": x, "name": name_of(x, encoding), "writer": writer,
                 "text": program.visible_text(spell(x))} for x, writer in zip(ids, writers)]

    data = {"settings": vars(settings), "chance": chance, "rule": says,
            "prompt": told(tokens, ["prompt"] * len(tokens)), "rounds": []}
    for one, caches in rounds:
        done.append(one)
        score = program.tally(done)
        score["tokens_per_pass"] = f"{score['tokens_per_pass']:.2f}"
        data["rounds"].append({
            "accepted": one.accepted, "one_by_one": one.verdict.one_by_one,
            "drafts": tell_drafts(one, encoding), "next": tell_next(one, chance, encoding),
            "new": told(one.new, one.writers), "caches": caches, "score": score})
    if done:  # the text may end inside of a character
        data["rounds"][-1]["new"][-1]["text"] += spell(encoding.eot_token, final=True)
    return data


def name_of(token, encoding):
    """A token by itself: a dot for a space, a sign for a line break, \\xNN for half a character."""
    text = encoding.decode_single_token_bytes(token).decode("utf-8", "backslashreplace")
    return program.visible(text).replace(" ", "·")


def rounded(numbers):
    """In three significant digits, so that small ones can be compared. 0 and 1 are exactly that."""
    return [str(x) if isinstance(x, int) else f"{x:.0f}" if x in (0, 1) else f"{x:#.3g}"
            for x in numbers]


def tell_drafts(one, encoding):
    """The drafts as a table {title: cells}. The verdicts are true of every rule."""
    n, count, one_by_one = one.accepted, len(one.drafts), one.verdict.one_by_one
    rows, x = torch.arange(count), torch.tensor(one.drafts, dtype=torch.long)
    columns = {"q(x)": one.q.cpu()[rows, x], "p(x)": one.p.cpu()[rows, x], **one.verdict.columns}
    cells = {title: rounded(torch.as_tensor(column).tolist()) for title, column in columns.items()}
    if one_by_one and "coin" in cells:  # coins behind the first 0 do not count
        cells["coin"][one.tested:] = ["-"] * (count - one.tested)
    behind = ["rejected"] + ["not tested" if one_by_one else "dropped"] * count
    if one.writers[-1] == "draft":
        behind = ["after the end"] * count
    return {"draft": [name_of(i, encoding) for i in one.drafts], **cells,
            "verdict": ["accepted"] * n + behind[:count - n]}


def tell_next(one, chance, encoding):
    """What the correction or bonus was drawn from, as a table: the likeliest tokens, the drawn one
    and the rejected draft, and all others in one row. Empty where a draft ended the text."""
    n, writer, verdict = one.accepted, one.writers[-1], one.verdict
    if writer == "draft":
        return {}
    tables = {"p": one.p[n]}  # each (V,)
    if writer == "correction":
        tables["q"] = one.q[n]
    if writer == "correction" and chance:
        keep = verdict.columns["keep"][n - 1] if "keep" in verdict.columns and n > 0 else 1
        tables["left"] = (keep * one.p[n] - one.q[n]).clamp(min=0)
    if verdict.drawn_from is not None:
        tables["drawn from"] = verdict.drawn_from
    ids = {one.new[-1], *one.drafts[n:n + 1]}
    for table in tables.values():
        ids |= {i for i in table.topk(min(3, len(table))).indices.tolist() if table[i] > 0}
    ids = sorted(ids, key=lambda i: -one.p[n, i].item())
    rows = torch.tensor(ids, device=one.p.device)
    cells = {title: rounded([*table[rows].tolist(), table.index_fill(0, rows, 0).sum().item()])
             for title, table in tables.items()}
    return {"next": [name_of(i, encoding) for i in ids] + ["all others"], **cells,
            "drawn": [writer if i == one.new[-1] else "" for i in ids] + [""]}


# ---------------------------------------------------------------- on the terminal, and as a page

def as_text(data, width):
    """Yields what is known of the rule, then each round, in lines no wider than `width`."""
    if data["rule"]:
        yield textwrap.fill(data["rule"], width) + "\n"
    text = "".join(token["text"] for token in data["prompt"])
    for number, one in enumerate(data["rounds"], 1):
        drafts, writer = one["drafts"]["draft"], one["new"][-1]["writer"]
        end = "which ends the text" if writer == "draft" else f"then a {writer}"
        lines = [f"round {number}: {len(drafts)} drafted, {one['accepted']} accepted, {end}",
                 "  …" + program.visible(text[-width:])[-(width // 2):]]
        lines += ["  {}'s cache: {} tokens, {} after feeding, {} after the rollback"
                  .format(name, *held) for name, held in one["caches"].items()]
        lines.append("  so far: {new_tokens} tokens, {passes} target passes, {tokens_per_pass} "
                     "tokens a pass, {accepted}/{tested} accepted/tested".format(**one["score"]))
        lines = [fitted(line, width) for line in lines]
        tables = table(one["drafts"], width) + table(one["next"], width)
        yield "\n".join([*lines[:2], *tables, *lines[2:], ""])
        text += "".join(token["text"] for token in one["new"])


def table(cells, width):
    """Lines: the titles, and under them a row each, in the colour of its last cell."""
    rows = list(zip(*([title, *column] for title, column in cells.items())))
    widths = [max(map(len, column)) for column in zip(*rows)]
    colours = {"accepted": "draft", "rejected": "correction"}
    return [program.coloured(fitted("  " + "  ".join(map(str.ljust, row, widths)).rstrip(), width),
                             colours.get(row[-1], row[-1])) for row in rows if len(rows) > 1]


def fitted(line, width):
    """A line cut where it would run over the edge. Some characters take two columns."""
    room = width - sum(unicodedata.east_asian_width(c) in "WF" for c in line)
    return line if len(line) <= room else line[:max(0, room - 1)] + "…"


def page(data):
    """trace.html with the data in it. The browser runs only what bears the number of this page."""
    source = Path(__file__).with_name("trace.html").read_text(encoding="utf-8")
    values = json.dumps(data).replace("<", "\\u003c")  # no token can end the script element
    return source.replace("{{nonce}}", secrets.token_hex(16)).replace("{{data}}", values)


def main(arguments=None):
    parser = program.decoding_parser("Tell how a text is written, round by round.", DRAFTERS)
    parser.add_argument("--html", metavar="FILE", help="write a page to FILE instead")
    options = parser.parse_args(arguments)
    with program.edges():
        if options.html:
            program.check_writable(options.html)
        pair, settings = program.prepared(options)
        _, tokens = program.prompt_of(pair, options)
        rounds = list(watched(pair, tokens, settings))
        data = tell(tokens, rounds, pair.encoding, settings)
        if options.html:
            Path(options.html).write_text(page(data), encoding="utf-8")
            print(f"wrote {program.visible(options.html)}: open it in a browser")
        else:
            print(*as_text(data, program.columns()), sep="\n")
        if options.json:
            done = [one for one, _ in rounds]
            figures = program.tally(done) if done else {}
            program.write_json(options.json, {**figures, "rounds": program.as_values(done)})


if __name__ == "__main__":
    main()
