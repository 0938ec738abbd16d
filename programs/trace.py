"""A text round by round, as a page to step through and to lecture from."""

import json
import re
from pathlib import Path

from programs.bench import timed, watch
from programs.decode import decode_plain, stopwatch, tally
from programs.options import about, clear_errors, parser_of, prepared, printable, write_json
from vocabulary import speller


def trace(pair, tokens, settings, eos=None):
    """Decode a text both ways. Returns its rounds, and plain values of all that is shown of them;
    "plain" (seconds) and "ids" are of the target alone."""
    now = stopwatch(pair.target.device)
    for _ in range(2):  # the first time is slow: it does not count
        ids, plain = timed(decode_plain(pair, tokens, settings), now)
        seen, seconds = timed(watch(pair, tokens, settings, now, eos), now)
    return [round_ for round_, *_ in seen], {
        **about(pair), "plain": plain, "ids": ids, "settings": vars(settings),
        **values_of(tokens, seen, seconds, pair.encoding)}


def values_of(tokens, seen, seconds, encoding):
    """The prompt and the rounds as plain values. seen: what `watch` gives."""
    spell = speller(encoding)

    def of_tokens(ids, writers):
        return [{"id": x, "name": name_of(x, encoding), "writer": writer,
                 "text": printable(spell(x))} for x, writer in zip(ids, writers)]

    prompt = of_tokens(tokens, ["prompt"] * len(tokens))
    rounds = [{"drafts": [[x, name_of(x, encoding), round_.q[i, x].item(),
                           round_.p[i, x].nan_to_num().item()]
                          for i, x in enumerate(round_.drafts)],
               "coins": coin_values(draws),
               "rows": [row_values(round_, i, draws, encoding) for i in range(len(round_.p))],
               "accepted": round_.accepted, "new": of_tokens(round_.new, round_.writers),
               "caches": {"target": round_.cache, "draft": cached}, "seconds": [drafting, whole]}
              for (round_, drafting, draws, cached), whole in zip(seen, seconds)]
    rounds[-1]["new"][-1]["text"] += spell(encoding.eot_token, final=True)  # half a character
    return {"prompt": prompt, "rounds": rounds}


def name_of(token, encoding):
    """A token by itself: a dot for a space, a sign for a line break, \\xNN for half a character."""
    text = encoding.decode_single_token_bytes(token).decode("utf-8", "backslashreplace")
    return printable(text).replace(" ", "·").replace("\n", "⏎").replace("\t", "\\t")


def coin_values(draws):
    """[chances to come up, what came] of the coins: tossed at once, (k, 2), or one by one, (2,)."""
    tossed = [(probs.view(-1, 2)[:, 1].tolist(), coins.view(-1).tolist())
              for probs, coins in draws if probs.shape[-1] == 2]
    return [sum(lists, []) for lists in zip(*tossed)] or [[], []]


def row_values(round_, i, draws, encoding):
    """Row i of a pass: its likeliest tokens, its draft and the token of the text, each with what
    became of it, and all others."""
    p = round_.p[i].nan_to_num()  # (V,) NaN behind a draft that is forbidden
    q = round_.q[i] if i < len(round_.drafts) else 0 * p
    columns = {"p": p, "q": q, "both": p.minimum(q)}
    if i == round_.accepted:  # what the correction or bonus was drawn from: the last draw
        columns |= {"from": probs.view(-1) for probs, _ in draws if probs.numel() == len(p)}
    fate = "rejected" if i == round_.accepted < len(round_.new) else "dropped"
    marks = dict.fromkeys(round_.drafts[i:i + 1], fate)
    marks |= zip(round_.new[i:i + 1], round_.writers[i:])
    likely = [x for x in p.maximum(q).topk(6).indices.tolist() if p[x] + q[x] > 0]
    shown = sorted({*likely, *marks}, key=lambda x: -p[x].item())
    others = [x for x in range(len(p)) if x not in shown]
    named = [*((x, name_of(x, encoding), x) for x in shown), (None, "all others", others)]
    return [{"id": x, "name": name, "mark": marks.get(x, ""),
             **{title: float(f"{probs[ids].sum():.3g}") for title, probs in columns.items()}}
            for x, name, ids in named]


def page(path, data):
    """A page with these data in it. They hold no "<", so no token ends the element around them."""
    text = json.dumps(data).replace("<", "\\u003c")
    return re.sub(r'(?<=id="data">)[^<]*', lambda _: text, path.read_text(encoding="utf-8"))


def main(arguments=None):
    parser = parser_of("Show how a text is written, round by round, on a page.", arguments)
    parser.add_argument("--html", metavar="FILE", default="rounds.html", help="the page to write")
    options = parser.parse_args(arguments)
    with clear_errors(parser):
        pair, settings, tokens = prepared(options)
        rounds, data = trace(pair, tokens, settings, pair.encoding.eot_token)
        html = page(Path(__file__).with_suffix(".html"), data)
        Path(options.html).write_text(html, encoding="utf-8")
        print(f"wrote {printable(options.html)}: open it in a browser")
        write_json(options.json, {**tally(rounds, settings.verify), "rounds": rounds})


if __name__ == "__main__":
    main()
