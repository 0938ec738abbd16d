"""A text told round by round, on the terminal or as a page to lecture from.

    python -m programs.trace "def main(" --html rounds.html
"""

import json
from pathlib import Path

from programs.bench import timed
from programs.decode import decode_plain, decode_speculative, stopwatch, styled, tally
from programs.options import clear_errors, machine, parser_of, prepared, printable, write_json
from sampling import seeded
from variants import DRAFTERS
from vocabulary import speller


def trace(pair, tokens, settings, eos=None):
    """Decode a text both ways. Returns its rounds, and plain values of all that is shown of them;
    "plain" and "ids" are of the target alone. Of three runs in turn the middle one is told."""
    now = stopwatch(pair.target.device)
    runs = [[timed(way, now) for way in (watch(pair, tokens, settings, eos, now),
                                         decode_plain(pair, tokens, settings))]
            for _ in range(4)][1:]  # the first is slow: it does not count
    (seen, seconds), (ids, plain) = (sorted(of_one_way, key=lambda run: sum(run[1]))[1]
                                     for of_one_way in zip(*runs))
    shapes = [f"{one.n_layer}x{one.n_embd}" for one in (pair.target.config, pair.draft.config)]
    return [one for one, *_ in seen], {
        "pair": "target {}, draft {}".format(*shapes), "machine": machine(pair), "plain": plain,
        "ids": ids, "settings": vars(settings), **tell(tokens, seen, seconds, pair.encoding)}


def watch(pair, tokens, settings, eos, now):
    """Yields each round, its rule's draws, the length of the draft's cache or None, and the seconds
    that its drafts took."""
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

    for one in decode_speculative(pair, tokens, settings, eos, propose, choose):
        cache = getattr(drafter, "cache", None)
        yield one, list(draws), cache and cache.length, drafting[-1]


def tell(tokens, seen, seconds, encoding):
    """The prompt and the rounds as plain values. seen: what `watch` gives."""
    spell = speller(encoding)

    def told(ids, writers):
        return [{"id": x, "name": name_of(x, encoding), "writer": writer,
                 "text": printable(spell(x), lines=True)} for x, writer in zip(ids, writers)]

    prompt = told(tokens, ["prompt"] * len(tokens))
    rounds = [{"drafts": [[x, name_of(x, encoding), one.q[i, x].item(),
                           one.p[i, x].nan_to_num().item()] for i, x in enumerate(one.drafts)],
               "coins": [[probs[:, 1].tolist(), coins.tolist()] for probs, coins in draws
                         if probs.shape == (len(one.drafts), 2)],
               "rows": [tell_row(one, i, draws, encoding) for i in range(len(one.p))],
               "accepted": one.accepted, "new": told(one.new, one.writers),
               "caches": {"target": one.cache, "draft": cached}, "seconds": [drafting, whole]}
              for (one, draws, cached, drafting), whole in zip(seen, seconds)]
    if rounds:  # the text may end inside of a character
        rounds[-1]["new"][-1]["text"] += spell(encoding.eot_token, final=True)
    return {"prompt": prompt, "rounds": rounds}


def name_of(token, encoding):
    """A token by itself: a dot for a space, a sign for a line break, \\xNN for half a character."""
    text = encoding.decode_single_token_bytes(token).decode("utf-8", "backslashreplace")
    return printable(text).replace(" ", "·")


def tell_row(one, i, draws, encoding):
    """Row i of a pass: its likeliest tokens, its draft and the token of the text, each with what
    became of it, and all others."""
    p = one.p[i].nan_to_num()  # (V,) NaN behind a draft that is forbidden
    q = one.q[i] if i < len(one.drafts) else 0 * p
    columns = {"p": p, "q": q, "both": p.minimum(q)}
    if i == one.accepted:  # what the correction or bonus was drawn from: the last draw
        columns |= {"from": probs.view(-1) for probs, _ in draws if probs.numel() == len(p)}
    fate = "rejected" if i == one.accepted < len(one.new) else "dropped"
    marks = dict.fromkeys(one.drafts[i:i + 1], fate) | dict(zip(one.new[i:i + 1], one.writers[i:]))
    likely = [x for x in p.maximum(q).topk(6).indices.tolist() if p[x] + q[x] > 0]
    shown = sorted({*likely, *marks}, key=lambda x: -p[x].item())
    others = [x for x in range(len(p)) if x not in shown]
    named = [*((x, name_of(x, encoding), x) for x in shown), (None, "all others", others)]
    return [{"id": x, "name": name, "mark": marks.get(x, ""),
             **{title: float(f"{probs[ids].sum():.3g}") for title, probs in columns.items()}}
            for x, name, ids in named]


def page(template, data):
    """A template of a page with data in it. No token can end the script element that holds it."""
    source = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return source.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"))


def main(arguments=None):
    parser = parser_of("Tell how a text is written, round by round.", arguments)
    parser.add_argument("--html", metavar="FILE", help="write a page to FILE instead")
    options = parser.parse_args(arguments)
    with clear_errors(parser):
        pair, settings, tokens = prepared(options)
        rounds, data = trace(pair, tokens, settings, pair.encoding.eot_token)
        if options.html:
            Path(options.html).write_text(page("trace.html", data), encoding="utf-8")
            print(f"wrote {printable(options.html)}: open it in a browser")
        for i, one in enumerate([] if options.html else data["rounds"], 1):
            print(f"round {i}: {1000 * one['seconds'][1]:.1f} ms")
            for item in (item for row in one["rows"] for item in row if item["mark"]):
                print(styled("  {mark:<11}{name:<22}q {q:<9} p {p}".format(**item), item["mark"]))
        write_json(options.json, {**tally(rounds, settings.verify), "rounds": rounds})


if __name__ == "__main__":
    main()
