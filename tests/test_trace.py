"""The trace tells what happened as plain values, and a page shows it. The page of the law stands
beside it in the tests: both need nothing from elsewhere, and take text as text."""

import json
import re
from pathlib import Path

import pytest
import torch

from micro import DEVICE, Clock, ended, micro_pair
from programs import options, trace
from programs.decode import decode_speculative
from programs.options import Settings
from rigs import Spy
from sampling import residual
from specdec import DraftModel, Round
from variants import DRAFTERS, RULES, block_keep
from vocabulary import make_encoding

BYTES = [bytes([b]) for b in range(256)]
ENCODING = make_encoding([*BYTES, b"</script>", b"\n    ", b'<b x="&amp;">', " é🙂".encode(),
                          b"{{data}}"])
SCRIPT, INDENT, TAG, ACCENT, DATA, EOS = range(256, 262)
ESCAPE, HALF = 0x1B, 0xC3  # a control character, and the first byte of é
PROMPT = ENCODING.encode_ordinary("if a <b and c> d:\n    ")
both_pages = pytest.mark.parametrize("name", ("trace.html", "law.html"))
PATHS = {"trace.html": Path(trace.__file__).with_name("trace.html"),
         "law.html": Path(trace.__file__).parent.parent / "docs" / "law.html"}


def source(name):
    """The page with nothing in it."""
    return trace.page(PATHS[name], {})


# ---------------------------------------------------------------- rounds made by hand

def round_of(drafts, accepted, new, seed=0):
    """What `watch` gives of a Round: random p and q, coins, a draw, a cache of 7, .25 seconds."""
    k, generator = len(drafts), torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(2 * k + 1, ENCODING.n_vocab, generator=generator, dtype=torch.float64)
    p, q = rows[:k + 1].softmax(-1).to(DEVICE), rows[k + 1:].softmax(-1).to(DEVICE)
    chance = torch.linspace(0.125, 0.875, k)
    draws = [(torch.stack([1 - chance, chance], -1), (torch.arange(k) < accepted).long()),
             (p[None, accepted], torch.tensor(new[-1:]))]
    return Round(drafts, accepted, new, (9, 10 + k, 9 + len(new)), p, q), 0.25, draws, 7


def by_hand():
    """Four rounds: a correction, after which é is half written; then é is whole, and a bonus; no
    drafts; a draft that ends the text."""
    return [round_of([SCRIPT, INDENT, ESCAPE, TAG], 2, [SCRIPT, INDENT, HALF]),
            round_of([0xA9, 13, ACCENT], 3, [0xA9, 13, ACCENT, DATA], seed=1),
            round_of([], 0, [ESCAPE], seed=2), round_of([65, EOS, 66, 67], 2, [65, EOS], seed=3)]


def told(seen=None):
    seen = by_hand() if seen is None else seen
    data = trace.values_of(PROMPT, seen, [0.5] * len(seen), ENCODING)
    return {"pair": "", "machine": "", "settings": {}, "plain": [0.25], **data}


# ---------------------------------------------------------------- what is told of a round

def test_every_draft_and_every_token_is_told_with_what_became_of_it():
    marks = [[{item["id"]: item["mark"] for item in row if item["mark"]} for row in one["rows"]]
             for one in told()["rounds"]]
    assert marks == [
        [{SCRIPT: "draft"}, {INDENT: "draft"}, {ESCAPE: "rejected", HALF: "correction"},
         {TAG: "dropped"}, {}],
        [{0xA9: "draft"}, {13: "draft"}, {ACCENT: "draft"}, {DATA: "bonus"}],
        [{ESCAPE: "bonus"}],
        [{65: "draft"}, {EOS: "draft"}, {66: "dropped"}, {67: "dropped"}, {}]]


def test_a_row_tells_p_and_q_of_all_tokens():
    """In three digits; of those that it does not name the sums. q is 0 where nothing was drafted,
    and the six that p or q likes most are named."""
    for (one, *_), shown in zip(by_hand(), told()["rounds"]):
        assert len(shown["rows"]) == len(one.drafts) + 1
        for i, row in enumerate(shown["rows"]):
            p, q = one.p[i], one.q[i] if i < len(one.drafts) else 0 * one.p[i]
            ids = [item["id"] for item in row[:-1]]
            rest = [x for x in range(len(p)) if x not in ids]
            assert {*p.maximum(q).topk(6).indices.tolist()} <= {*ids}
            for item, which in zip(row, [*ids, rest], strict=True):
                for key, probs in (("p", p), ("q", q), ("both", p.minimum(q))):
                    assert item[key] == pytest.approx(probs[which].sum().item(), rel=5.1e-3)
        assert [(x, q, p) for x, _, q, p in shown["drafts"]] == [
            (x, one.q[i, x].item(), one.p[i, x].item()) for i, x in enumerate(one.drafts)]


def test_nan_behind_a_forbidden_draft_is_told_as_0_for_json_has_none():
    one, *others = round_of([SCRIPT, TAG], 0, [65])
    one.p[1] = torch.nan
    data = told([(one, *others)])
    assert json.dumps(data, allow_nan=False) and data["rounds"][0]["drafts"][1][3] == 0


def test_the_tokens_spell_the_text():
    """é was cut after its first byte, and comes with the second."""
    data, rounds = told(), [one for one, *_ in by_hand()]
    tokens = [token for one in data["rounds"] for token in one["new"]]
    text = r"</script>" + "\n    " + r"é\r é🙂{{data}}\x1bA"
    assert "".join(token["text"] for token in tokens) == text
    assert "".join(token["text"] for token in data["prompt"]) == "if a <b and c> d:\n    "
    assert [(token["id"], token["writer"]) for token in tokens] == [
        pair for one in rounds for pair in zip(one.new, one.writers)]
    assert tokens[1]["name"] == "⏎····" and tokens[2]["name"] == r"\xc3"
    cut = told(by_hand()[:1])
    assert cut["rounds"][-1]["new"][-1]["text"] == "\N{REPLACEMENT CHARACTER}"


# ---------------------------------------------------------------- looking on

def watched(**changes):
    return list(trace.watch(micro_pair(), [72, 105, 32], Settings(40, 4, **changes), Clock()))


@pytest.mark.parametrize("verify", ("token", "block"))
def test_coins_and_the_last_draw_are_those_of_the_rule(verify):
    """The chances of the token rule are min(1, p/q). Of both, the correction was drawn from what q
    leaves of p, or with the block rule of the part of p that is kept; a bonus from p."""
    seen = watched(verify=verify)
    alone = decode_speculative(micro_pair(), [72, 105, 32], Settings(40, 4, verify=verify))
    assert [one.new for one, *_ in seen] == [one.new for one in alone], "looking on changes it"
    shown = trace.values_of([72], seen, [1] * len(seen), micro_pair().encoding)["rounds"]
    assert {one["new"][-1]["writer"] for one in shown} == {"correction", "bonus"}
    for (one, _, draws, _), of in zip(seen, shown):
        n, k, drafted = one.accepted, len(one.drafts), torch.tensor(one.drafts, device=DEVICE)
        chances, coins = of["coins"]
        if verify == "token":
            assert chances == pytest.approx([min(1, p / q) for *_, q, p in of["drafts"]])
            assert (coins + [0]).index(0) == n
        else:
            assert max([i for i, coin in enumerate(coins, 1) if coin], default=0) == n
        keep = block_keep(one.p, one.q, drafted)[n] if verify == "block" else 1
        drawn_from = residual(keep * one.p[n], one.q[n]) if n < k else one.p[n]
        row = {item["id"]: item for item in of["rows"][n]}
        for x in row.keys() - {None}:
            assert row[x]["from"] == pytest.approx(drawn_from[x].item(), rel=6e-3, abs=1e-6)
        assert all("from" not in item for i, row in enumerate(of["rows"]) for item in row if i != n)


def test_the_cache_of_the_draft_is_told_where_it_can_be_found(monkeypatch):
    """By counting what the draft model reads between one round and the next. A drafter of one's own
    that has a `cache` is told with it, and one without, like lookup, is told without."""
    read, draft = [], micro_pair().draft
    hook = draft.register_forward_pre_hook(lambda _, given: read.append(given[0].numel()))
    held = 0
    for one, *_, cached in trace.watch(micro_pair(), [72, 105, 32], Settings(40, 4), int):
        assert cached == held + sum(read), "it holds other tokens than were read"
        held = min(cached, one.cache[2])
        read.clear()
    hook.remove()
    assert held > 30 and {cached for *_, cached in watched(drafter="lookup")} == {None}
    monkeypatch.setitem(DRAFTERS, "own", lambda pair, warp: DraftModel(pair.target, warp))
    assert all(cached for *_, cached in watched(drafter="own"))


def test_a_token_that_cannot_come_is_not_named():
    """At temperature 0, with a drafter that is certain, one token or two have all the mass."""
    seen = watched(temperature=0, drafter="lookup")
    for one in trace.values_of([72], seen, [1] * len(seen), micro_pair().encoding)["rounds"]:
        assert all(1 <= len(row[:-1]) <= 2 and row[-1]["p"] == 0 for row in one["rows"])


@pytest.mark.parametrize("draws", (True, False))
def test_of_a_rule_of_ones_own_no_more_is_told_than_it_draws(draws, monkeypatch):
    """One that tosses no coin, and one that draws nothing at all."""
    def rule(p, q, drafted, choose):
        none = torch.zeros((), dtype=torch.long, device=p.device)
        return none, choose(p[0]) if draws else p[0].argmax()

    monkeypatch.setitem(RULES, "mine", rule)
    given = micro_pair(), [72, 105, 32], Settings(5, 2, verify="mine")
    rounds, data = trace.trace(*given)
    ids = [one.new[0] for one in rounds]
    assert len(trace.trace(*given, eos=ids[2])[0]) == ids.index(ids[2]) + 1, "the text goes on"
    for one in data["rounds"]:
        assert one["coins"] == [[], []] and one["accepted"] == 0
        assert all(("from" in item) == draws for item in one["rows"][0])


def test_coins_that_are_tossed_one_by_one_are_told_as_well(monkeypatch):
    """As a student's loop does: up to the first that says no."""
    chances = [0.5, 0.75, 0.625, 0.875]

    def rule(p, q, drafted, choose):
        n = 0
        while n < len(drafted) and choose(p.new_tensor([1 - chances[n], chances[n]])):
            n += 1
        return torch.tensor(n, device=p.device), choose(p[n])

    monkeypatch.setitem(RULES, "mine", rule)
    seen = watched(verify="mine")
    for one in trace.values_of([72], seen, [1] * len(seen), micro_pair().encoding)["rounds"]:
        stand, rejected = one["accepted"], one["accepted"] < len(one["drafts"])
        assert one["coins"] == [chances[:stand + rejected], [1] * stand + [0] * rejected]


# ---------------------------------------------------------------- seconds

def test_all_seconds_are_measured(monkeypatch):
    """A clock that stands still but where a model reads: a token takes the target two seconds and
    the draft a quarter. All of it is 100 times slower in the first run: that does not count."""
    clock, runs, pair = Clock(), [], micro_pair()
    target, draft = (Spy(model, lambda held, ids, seconds=seconds: clock.add(
        seconds * len(ids) * (100 if len(runs) < 3 else 1)))
        for model, seconds in ((pair.target, 2), (pair.draft, 1 / 4)))
    target.new_cache = lambda: runs.append("a text") or pair.target.new_cache()
    monkeypatch.setattr(trace, "stopwatch", lambda device: clock)
    monkeypatch.setattr(trace, "about", lambda pair: {})
    slow = type(pair)(target, draft, pair.encoding, [], {})
    rounds, data = trace.trace(slow, [72, 105, 32], Settings(12, 2))
    assert len(runs) == 4 and data["plain"] == [6.0] + [2.0] * 11
    for i, (one, shown) in enumerate(zip(rounds, data["rounds"])):
        drafting, whole = shown["seconds"]
        assert whole - drafting == 2 * (one.cache[1] - one.cache[0]), "a pass reads so many tokens"
        unread = 3 if i == 0 else 1 + (rounds[i - 1].writers[-1] == "bonus")
        assert drafting == 2 / 8 * (unread + len(one.drafts) - 1) * bool(one.drafts)


# ---------------------------------------------------------------- the pages

def embedded(page):
    """The values that a page holds, up to what a browser takes for the end of them."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script', page,
                                re.DOTALL)[1])


def elements(page):
    return re.findall(r"<\w+[^>]*>", re.sub(r"(<script[^>]*>).*?</script", r"\1", page,
                                           flags=re.DOTALL))


@both_pages
def test_text_stays_text(name):
    """Tokens are {{data}}, </script>, <!--<script>: behind that a browser takes the next end of a
    script for the end of that one. They add no element to the page."""
    data = {**told(), "more": "<!--<script> & </script> \u2028"}
    page = trace.page(PATHS[name], data)
    assert embedded(page) == json.loads(json.dumps(data))
    assert elements(page) == elements(source(name))
    assert "replaceChildren" in page and not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", source(name))


@both_pages
def test_a_page_fetches_nothing(name):
    assert not re.search(r"src=|href=|url\(|@import|fetch\(|import\(|XMLHttp|WebSocket|<link|<img",
                         source(name))
    assert {*re.findall(r"https?:[^\s\"']*", source(name))} <= {"http://www.w3.org/2000/svg"}
    assert not [tag for tag in elements(source(name)) if re.search(r"\s(on\w+|style)=", tag)]


@both_pages
def test_a_script_is_whole(name):
    """As far as can be told without a browser: as many brackets are closed as are opened, each
    element that it asks for is there, and each button has an action."""
    script = re.findall(r"<script>(.*?)</script>", source(name), re.DOTALL)[-1]
    for opened, closed in ("()", "[]", "{}"):
        assert script.count(opened) == script.count(closed), f"not each {opened} is closed"
    asked = {*re.findall(r'byId\("(\w+)"\)', source(name))}
    assert asked <= {*re.findall(r'\sid="(\w+)"', source(name))}
    actions = {*re.findall(r'^  "?(\w+|\?| )"?: ', script, re.MULTILINE)}
    assert {*re.findall(r'data-key="([^"]*)"', source(name))} <= actions


# ---------------------------------------------------------------- the command line

def test_the_page_and_the_file_hold_the_rounds_that_the_options_ask_for(
        kept, tmp_path, monkeypatch, capsys):
    given, real = [], trace.trace
    monkeypatch.setattr(trace, "trace", lambda *all: given.extend(all) or real(*all))
    files = ["--html", tmp_path / "page.html", "--json", tmp_path / "json"]
    asked = ["def f", *kept, "--verify", "block", "--gamma", 5, "--seed", 9, "--max-new", 12]
    assert ended(trace, [*asked, *files], capsys) == (
        0, f"wrote {options.printable(str(tmp_path))}/page.html: open it in a browser\n", "")
    pair, *others = given
    assert others == [pair.encoding.encode_ordinary("def f"),
                      Settings(12, 5, seed=9, verify="block"), pair.encoding.eot_token]
    data = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))
    values = json.loads((tmp_path / "json").read_text(encoding="utf-8"))
    assert values.items() >= {"new_tokens": 12, "passes": len(data["rounds"])}.items()
    assert [one["new"] for one in values["rounds"]] == [
        [token["id"] for token in one["new"]] for one in data["rounds"]]
