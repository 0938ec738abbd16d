"""The trace tells what happened, in plain text and in a page that stands alone, and no more."""

import functools
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import specdec
import trace
from program import Settings, tally
from rigs import DEVICE, ended, forbidden, is_one_clear_line, micro_pair, seeded, tables, text
from sampling import VERIFY, Verdict, verify_token
from specdec import DRAFTERS, DraftModel, Round
from vocabulary import make_encoding

BYTES = [bytes([b]) for b in range(256)]
ENCODING = make_encoding([*BYTES, b"</script>", b"\n    ", b'<b x="&amp;">', " é🙂".encode(),
                          b"{{data}}"])
SCRIPT, INDENT, TAG, ACCENT, DATA, EOS = range(256, 262)
ESCAPE, HALF = 0x1B, 0xC3  # a control character, and the first byte of é
V = ENCODING.n_vocab
PROMPT = ENCODING.encode_ordinary("if a <b and c> d:\n    ")


# ---------------------------------------------------------------- rounds made by hand

def decided(verify, drafts, coins, token, p=None, q=None, seed=0):
    """A round of a rule whose coins fell so, and which drew this token. p, q: given, or random."""
    generator = torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(2 * len(drafts) + 1, V, generator=generator, dtype=torch.float64)
    p = rows[:len(drafts) + 1].softmax(-1).to(DEVICE) if p is None else p
    q = rows[len(drafts) + 1:].softmax(-1).to(DEVICE) if q is None else q
    draws = iter([torch.tensor(coins, dtype=torch.long), torch.tensor(token)])
    drafted = torch.tensor(drafts, dtype=torch.long, device=DEVICE)
    verdict = verify(p, q, drafted, lambda probs: next(draws).to(DEVICE))
    n = verdict.n.item()
    new = drafts[:n] + [token]
    if EOS in new:
        new = new[:new.index(EOS) + 1]
    accepted = min(n, len(new))
    return Round(drafts, accepted, new, 9, 10 + len(drafts), 9 + len(new), verdict, p, q)


def by_hand(name):
    """Four rounds: a correction, after which é is half written; then é is whole, and a bonus; no
    drafts; a draft that ends the text. The block rule has a coin 0, which never counts."""
    first = [1] if name == "block" else []
    return [decided(VERIFY[name], [SCRIPT, INDENT, ESCAPE, TAG],
                    first + ([1, 1, 0, 1] if name == "token" else [0, 1, 0, 0]), HALF),
            decided(VERIFY[name], [0xA9, 13, ACCENT], first + [1, 1, 1], DATA, seed=1),
            decided(VERIFY[name], [], first, ESCAPE, seed=2),
            decided(VERIFY[name], [65, EOS, 66, 67],
                    first + ([1, 1, 1, 0] if name == "token" else [0, 0, 1, 0]), 68, seed=3)]


TEXT = r"</script>" + "\n    " + r"é\r é🙂{{data}}\x1bA"


def told(rounds, name="token", caches=None, tokens=PROMPT):
    """What the trace makes of rounds."""
    caches = caches or {"target": [9, 14, 12]}
    return trace.tell(tokens, [(one, caches) for one in rounds], ENCODING, Settings(verify=name))


def lines_of(data):
    return "\n".join(trace.as_text(data)).split("\n")


def rows_of(cells):
    """A table {title: cells} as rows."""
    return list(zip(*cells.values()))


both = pytest.mark.parametrize("name", ("token", "block"))


# ---------------------------------------------------------------- what is told of the drafts

FATES = {
    "token": [["1 accepted", "1 accepted", "0 rejected", "- not tested"], ["1 accepted"] * 3, [],
              ["1 accepted", "1 accepted", "- after the end", "- after the end"]],
    "block": [["0 accepted", "1 accepted", "0 rejected", "0 dropped"], ["1 accepted"] * 3, [],
              ["0 accepted", "0 accepted", "1 after the end", "0 after the end"]],
}


@both
def test_every_draft_is_told_with_its_coin_and_its_fate(name):
    """The block rule's coins all count, also those of drafts behind an end of text."""
    rounds = by_hand(name)
    data = told(rounds, name)
    for one, fates, round_told in zip(rounds, FATES[name], data["rounds"], strict=True):
        drafts = round_told["drafts"]
        assert drafts["draft"] == [trace.name_of(x, ENCODING) for x in one.drafts]
        assert [f"{coin} {fate}" for coin, fate in zip(drafts["coin"], drafts["verdict"])] == fates
        assert round_told["accepted"] == one.accepted
        assert round_told["one_by_one"] == (name == "token")


@both
def test_q_and_p_are_those_of_the_drafts(name):
    for one, round_told in zip(by_hand(name), told(by_hand(name), name)["rounds"]):
        for title, table in (("q(x)", one.q), ("p(x)", one.p)):
            assert round_told["drafts"][title] == [f"{table[i, x].item():#.3g}"
                                                   for i, x in enumerate(one.drafts)]


def test_the_token_rule_is_told_with_the_smaller_of_1_and_p_over_q():
    for one, round_told in zip(by_hand("token"), told(by_hand("token"))["rounds"]):
        chances = [min(1, (one.p[i, x] / one.q[i, x]).item()) for i, x in enumerate(one.drafts)]
        assert round_told["drafts"]["chance"] == trace.rounded(chances)


def test_the_block_rule_is_told_with_keep_and_h():
    one, keep, expected = by_hand("block")[0], 1.0, []
    for i, x in enumerate(one.drafts):
        keep = min(1, keep * (one.p[i, x] / one.q[i, x]).item())
        h = keep
        if i + 1 < len(one.drafts):
            pairs = zip(one.p[i + 1].tolist(), one.q[i + 1].tolist())
            Z = math.fsum(max(keep * p - q, 0) for p, q in pairs)
            h = Z / (Z + 1 - keep) if Z > 0 else 0
        expected.append((keep, h))
    drafts = told([one], "block")["rounds"][0]["drafts"]
    for shown, numbers in zip(zip(drafts["keep"], drafts["chance"]), expected, strict=True):
        assert [float(x) for x in shown] == pytest.approx(numbers, rel=5.01e-3)


@pytest.mark.parametrize("number, shown", [
    (0.001, "0.00100"), (0.0003, "0.000300"), (1 / 3, "0.333"), (1.0, "1"), (0.0, "0"),
    (0.9999, "1.00"), (1e-7, "1.00e-07"), (7, "7.00"), (math.inf, "inf"), (math.nan, "nan")])
def test_a_number_has_three_significant_digits(number, shown):
    assert trace.rounded([number]) == [shown]


@both
def test_a_rule_is_explained_in_its_own_words(name):
    """By the first paragraph of its docstring, which says what its columns are."""
    data = told(by_hand(name), name)
    words = " ".join(VERIFY[name].__doc__.split())
    assert words.startswith(data["rule"]) and data["rule"].endswith(".")
    for column in {"token": ["chance"], "block": ["keep", "chance"]}[name]:
        assert re.search(column + "(:| =)", data["rule"])
        assert column in data["rounds"][0]["drafts"]
    assert "(γ, V)" not in data["rule"]
    assert " ".join(lines_of(data)).startswith(data["rule"])


# ---------------------------------------------------------------- what is told of the next token

def test_a_correction_is_told_with_what_q_leaves_of_p():
    """.27 and .15 are left, divided by .42. The last three tokens are the others: .03 of p, .05 of
    q, and nothing left. The draft behind the rejected one has no part in it."""
    p = tables([.4, .47, .1, 0, .01, .02], [0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0])
    q = tables([.25, .2, .5, 0, .02, .03], [0, 1, 0, 0, 0, 0])
    (one,) = told([decided(verify_token, [2, 1], [0, 1], 0, p, q)])["rounds"]
    assert list(one["next"]) == ["next", "p", "q", "left", "drawn from", "drawn"]
    assert rows_of(one["next"]) == [
        (r"\x01", "0.470", "0.200", "0.270", "0.643", ""),
        (r"\x00", "0.400", "0.250", "0.150", "0.357", "correction"),
        (r"\x02", "0.100", "0.500", "0", "0", ""),
        ("all others", "0.0300", "0.0500", "0", "0", "")]


def test_above_each_round_stands_the_end_of_all_text_before_it():
    data = told(by_hand("token"))
    text, ends = "".join(token["text"] for token in data["prompt"]), []
    for one in data["rounds"]:
        ends.append("  …" + text.replace("\n", "⏎")[-40:])
        text += "".join(token["text"] for token in one["new"])
    assert [line for line in lines_of(data) if line.startswith("  …")] == ends


def test_a_correction_of_the_block_rule_is_told_with_what_q_leaves_of_keep_p():
    """keep_1 = .3/.5 = .6, and .6 p = [.3, .18, .12]: .2 and .06 are left, divided by .26."""
    p, q = tables([.6, .3, .1], [.5, .3, .2], [1, 0, 0]), tables([.3, .5, .2], [.1, .12, .78])
    (one,) = told([decided(VERIFY["block"], [1, 2], [1, 1, 0], 0, p, q)], "block")["rounds"]
    assert rows_of(one["next"]) == [
        (r"\x00", "0.500", "0.100", "0.200", "0.769", "correction"),
        (r"\x01", "0.300", "0.120", "0.0600", "0.231", ""),
        (r"\x02", "0.200", "0.780", "0", "0", ""), ("all others", "0", "0", "0", "0", "")]
    assert one["drafts"]["keep"][0] == "0.600"
    (one,) = told([decided(VERIFY["block"], [1, 2], [1, 0, 0], 0, p, q)], "block")["rounds"]
    assert one["next"]["left"] == ["0.300", "0", "0", "0"]  # before the first draft keep is 1


@both
def test_a_bonus_is_told_with_p(name):
    first = [0] if name == "block" else []
    p, q = tables([0, 0, 1, 0], [.75, .25, 0, 0]), tables([0, 0, 1, 0])
    (one,) = told([decided(VERIFY[name], [2], first + [1], 1, p, q)], name)["rounds"]
    assert one["next"] == {"next": [r"\x00", r"\x01", "all others"], "p": ["0.750", "0.250", "0"],
                           "drawn from": ["0.750", "0.250", "0"], "drawn": ["", "bonus", ""]}


@both
def test_the_candidates_are_all_of_their_distribution(name):
    """Each sums to 1, the others included; the drawn token and the rejected draft are there."""
    for one, round_told in zip(by_hand(name)[:3], told(by_hand(name), name)["rounds"]):
        cells = round_told["next"]
        for title in {"p", "q", "drawn from"} & cells.keys():
            assert abs(sum(map(float, cells[title])) - 1) < 0.01
        drawn = cells["drawn"].index(one.writers[-1])
        assert cells["next"][drawn] == trace.name_of(one.new[-1], ENCODING)
        rejected = one.drafts[one.accepted:one.accepted + 1]
        assert {trace.name_of(x, ENCODING) for x in rejected} <= set(cells["next"])


@both
def test_a_text_that_a_draft_ends_has_no_token_after_it(name):
    data = told(by_hand(name), name)
    assert [one["next"] == {} for one in data["rounds"]] == [False, False, False, True]
    assert "round 4: 4 drafted, 2 accepted, which ends the text" in lines_of(data)


# ---------------------------------------------------------------- what is told of the text

@both
def test_the_tokens_spell_the_text(name):
    """é was cut after its first byte, and comes with the second."""
    data, rounds = told(by_hand(name), name), by_hand(name)
    tokens = [token for one in data["rounds"] for token in one["new"]]
    assert "".join(token["text"] for token in tokens) == TEXT
    assert "".join(token["text"] for token in data["prompt"]) == "if a <b and c> d:\n    "
    assert [token["id"] for token in tokens] == list(text(rounds))
    assert [token["writer"] for token in tokens] == [by for one in rounds for by in one.writers]
    assert tokens[1]["name"] == "⏎····" and tokens[2]["name"] == r"\xc3"


def test_a_character_that_the_text_ends_in_is_not_lost():
    data = told(by_hand("token")[:1])
    assert data["rounds"][-1]["new"][-1]["text"] == "\N{REPLACEMENT CHARACTER}"


@both
def test_the_score_is_that_of_the_rounds_so_far(name):
    rounds = by_hand(name)
    for number, one in enumerate(told(rounds, name)["rounds"], 1):
        assert one["score"] == tally(rounds[:number])
    so_far = "  so far: 10 tokens in 4 target passes, 2.50 a pass, 7/8 accepted/tested"
    assert so_far in lines_of(told(rounds, name))


def test_no_rounds_are_told_by_the_prompt_alone():
    data = told([])
    assert data["rounds"] == [] and len(data["prompt"]) == len(PROMPT)
    assert " ".join(lines_of(data)).strip() == data["rule"] and embedded(trace.page(data)) == data


# ---------------------------------------------------------------- caches

def watched(**settings):
    settings = Settings(max_new=40, gamma=4, **settings)
    return list(trace.watched(micro_pair(), [72, 105, 32], settings))


@both
def test_what_is_told_of_the_draft_cache_is_what_was_fed(name):
    """By counting the tokens that went into the draft model between one round and the next."""
    fed, before, draft = [], 0, micro_pair().draft
    hook = draft.register_forward_pre_hook(lambda _, given: fed.append(given[0].numel()))
    settings = Settings(max_new=40, gamma=4, verify=name)
    for one, caches in trace.watched(micro_pair(), [72, 105, 32], settings):
        assert caches["draft"][:2] == [before, before + sum(fed)]
        assert caches["target"] == [one.cache_before, one.cache_fed, one.cache_kept]
        assert caches["draft"][2] == min(caches["draft"][1], caches["target"][2])
        before = caches["draft"][2]
        fed.clear()
    hook.remove()
    assert before > 30


def test_a_drafter_without_a_cache_is_told_without_one():
    assert all(caches.keys() == {"target"} for _, caches in watched(drafter="lookup"))


def test_both_caches_are_on_the_terminal():
    lines = lines_of(told(by_hand("token"), caches={"target": [9, 14, 12], "draft": [8, 13, 11]}))
    for name, numbers in (("target", (9, 14, 12)), ("draft", (8, 13, 11))):
        assert ("  {}'s cache: {} tokens, {} after feeding, {} after the rollback"
                .format(name, *numbers)) in lines


# ---------------------------------------------------------------- rules and drafters of one's own

def only_what_it_must(p, q, drafted, choose):
    """A rule that says no more than n and token, and draws before it decides."""
    token = choose(p[0])
    return Verdict(torch.zeros_like(token), token)


def columns_of_its_own(p, q, drafted, choose):
    verdict = verify_token(p, q, drafted, choose)
    columns = {"rank": (p[:-1] > p[:-1].gather(-1, drafted[:, None])).sum(-1),
               "luck": verdict.columns["chance"], "toss": verdict.columns["coin"]}
    return replace(verdict, columns=columns)


def corrects_from_p(p, q, drafted, choose):
    """A wrong rule."""
    verdict = verify_token(p, q, drafted, choose)
    drawn_from = p[verdict.n]
    return replace(verdict, token=choose(drawn_from), drawn_from=drawn_from)


@pytest.fixture
def own(monkeypatch):
    """rounds and what is told of them, of a rule by its name."""
    monkeypatch.setitem(VERIFY, "must", only_what_it_must)
    monkeypatch.setitem(VERIFY, "columns", columns_of_its_own)
    monkeypatch.setitem(VERIFY, "wrong", corrects_from_p)
    monkeypatch.setitem(VERIFY, "partial", functools.partial(only_what_it_must))

    def tell(name):
        rounds = watched(verify=name)
        data = trace.tell([72, 105, 32], rounds, micro_pair().encoding, Settings(verify=name))
        return [one for one, _ in rounds], data

    return tell


def test_of_a_rule_of_ones_own_no_more_is_told_than_it_says(own):
    rounds, data = own("must")
    assert data["rule"] == only_what_it_must.__doc__ and len(rounds) == 40
    for one, round_told in zip(rounds, data["rounds"]):
        drafts, cells = round_told["drafts"], round_told["next"]
        count = len(one.drafts)
        assert list(drafts) == ["draft", "q(x)", "p(x)", "verdict"]
        assert drafts["verdict"] == (["rejected"] + ["dropped"] * count)[:count]
        assert list(cells) == ["next", "p", *["q"] * (count > 0), "drawn"]
    assert "chance" not in "\n".join(lines_of(data)) and "keep" not in "\n".join(lines_of(data))


def test_a_rule_of_ones_own_is_told_with_its_own_columns(own):
    rounds, data = own("columns")
    assert data["rule"] == ""  # it has no docstring
    for one, round_told in zip(rounds, data["rounds"]):
        drafts = round_told["drafts"]
        assert list(drafts) == ["draft", "q(x)", "p(x)", "rank", "luck", "toss", "verdict"]
        for title, values in one.verdict.columns.items():
            assert drafts[title] == trace.rounded(values.tolist())
        assert "drawn from" in round_told["next"]
    fates = {fate for one in data["rounds"] for fate in one["drafts"]["verdict"]}
    assert fates == {"accepted", "rejected", "not tested"}


def test_what_is_left_is_shown_where_it_was_drawn_from_alone(own):
    for name, shown in (("token", True), ("block", True), ("columns", True), ("wrong", False),
                        ("must", False)):
        rounds, data = own(name)
        told_of = [round_told["next"] for one, round_told in zip(rounds, data["rounds"])
                   if one.writers[-1] == "correction"]
        assert told_of and all(("left" in cells) == shown for cells in told_of)


def test_a_rule_without_words_of_its_own_is_not_explained(own):
    """functools.partial has a docstring, but not one of the rule."""
    assert own("partial")[1]["rule"] == ""


def test_a_drafter_of_ones_own_is_told_with_its_cache_if_it_is_a_draft_model(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "mine", lambda pair, warp: DraftModel(pair.target, warp))
    assert all(one.accepted == len(one.drafts) and caches["draft"][1] > 0
               for one, caches in watched(drafter="mine"))


# ---------------------------------------------------------------- on the terminal

@both
def test_the_terminal_shows_every_cell_of_the_tables(name):
    data = told(by_hand(name), name)
    lines = [line.split() for line in lines_of(data)]
    for one in data["rounds"]:
        for row in (*rows_of(one["drafts"]), *rows_of(one["next"])):
            assert " ".join(row).split() in lines


@both
def test_text_outside_a_terminal_holds_no_control_characters(name):
    assert "".join(lines_of(told(by_hand(name), name))).isprintable()


def test_colours_are_those_of_the_writers(monkeypatch):
    plain = lines_of(told(by_hand("token")))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = lines_of(told(by_hand("token")))
    assert [re.sub(r"\x1b\[\d*m", "", line) for line in lines] == plain
    for line, bare in zip(lines, plain):
        fate = bare.split()[-1] if bare else ""
        colour = {"accepted": "32", "rejected": "31", "correction": "31", "bonus": "34"}.get(fate)
        in_table = bare.startswith("  ") and not bare.startswith("  …")
        assert line == (f"\x1b[{colour}m{bare}\x1b[0m" if colour and in_table else bare)
    assert sum(line.startswith("\x1b") for line in lines) == 7 + 1 + 1 + 2


def test_the_last_words_before_a_round_are_shown_above_its_tables():
    lines = lines_of(told(by_hand("token"), tokens=ENCODING.encode_ordinary("x " * 99 + "def f")))
    assert "  …" + ("x " * 99 + "def f")[-40:] in lines
    assert lines[lines.index("round 2: 3 drafted, 3 accepted, then a bonus") + 1].endswith("⏎    ")


def test_a_text_of_many_rounds_is_told_in_80_columns():
    lines = lines_of(told(by_hand("block") * 30, "block"))
    assert max(map(len, lines)) <= 80 and "  so far: 300 tokens in 120 target passes" in lines[-2]


# ---------------------------------------------------------------- the page

class Page(HTMLParser):
    """What a browser makes of a page before its script runs: elements, and what they hold."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.inside = [], {}
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, content):
        key = len(self.elements) - 1
        self.inside[key] = self.inside.get(key, "") + content

    def contents(self, tag):
        """[(attributes, content)] of the elements with this tag."""
        return [(attributes, self.inside.get(i, ""))
                for i, (name, attributes) in enumerate(self.elements) if name == tag]


def embedded(source):
    """The values that a page holds."""
    (found,) = [content for attributes, content in Page(source).contents("script")
                if attributes.get("type") == "application/json"]
    return json.loads(found)


@both
def test_the_page_holds_the_values_that_the_terminal_shows(name):
    """Though tokens are {{data}}, </script> and half characters."""
    data = told(by_hand(name), name)
    assert embedded(trace.page(data)) == data
    assert "⏎" in Page(trace.page(data)).contents("script")[-1][1]


def test_no_text_begins_anything_in_the_page():
    """Behind <!--<script> a browser takes the next end of a script for the end of that one."""
    page = trace.page({"prompt": "<!--<script> & </script>"})
    assert embedded(page) == {"prompt": "<!--<script> & </script>"}
    assert "<" not in page.split('type="application/json"')[1].split("</script>")[0]


def test_tokens_add_no_elements_to_the_page():
    with_tokens, without = (
        str(Page(trace.page(told(rounds, tokens=prompt))).elements)
        for rounds, prompt in ((by_hand("token"), PROMPT), ([], [])))
    assert with_tokens == without and with_tokens.count("('script'") == 2
    assert "\u2028" not in trace.page(told([], tokens=ENCODING.encode_ordinary("\u2028")))


def test_the_page_fetches_nothing():
    source = trace.page(told(by_hand("token")))
    assert not re.search(r"https?:|src=|href=|url\(|@import|fetch\(|import\(|XMLHttp", source)
    tags = {tag for tag, _ in Page(source).elements}
    assert not {"link", "img", "iframe", "object", "base"} & tags


def test_the_page_takes_text_as_text():
    source = Path(trace.__file__).with_name("trace.html").read_text(encoding="utf-8")
    assert "replaceChildren" in source and not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", source)
    assert not any(name.startswith("on") or name == "style"
                   for _, attributes in Page(source).elements for name in attributes)


# ---------------------------------------------------------------- the command line

@pytest.fixture
def asked(kept, monkeypatch, capsys):
    """What the loop is given for a command line."""
    def loop(*arguments):
        given = {}

        def stand_in(target, propose, tokens, max_new, gamma, warp, choose, verify, eos):
            given.update(locals())
            return iter(())

        monkeypatch.setattr(specdec, "speculative", stand_in)
        code, _, err = ended(trace, [*arguments, *kept], capsys)
        assert (code, err) == (0, "")
        return given

    return loop


@pytest.mark.parametrize("option, name, value", [
    ("--max-new 7", "max_new", 7), ("", "max_new", 200), ("--gamma 5", "gamma", 5),
    ("", "gamma", 3)])
def test_an_option_of_the_loop_reaches_it(option, name, value, asked):
    assert asked(*option.split())[name] == value


@pytest.mark.parametrize("option, setting", [
    ("--temperature 0.5", dict(temperature=0.5)), ("--top-k 3", dict(top_k=3)),
    ("--top-p 0.7", dict(top_p=0.7)), ("", {})])
def test_an_option_of_the_warp_reaches_both_models(option, setting, asked):
    given = asked(*option.split())
    expected = {"temperature": 1.0, "top_k": None, "top_p": 1.0, **setting}
    assert given["warp"].keywords == given["propose"].warp.keywords == expected


def test_prompt_rule_drafter_and_seed_reach_the_loop(asked):
    given, encoding = asked("def f", "--verify", "block", "--seed", "9"), micro_pair().encoding
    assert given["tokens"] == encoding.encode_ordinary("def f")
    assert given["eos"] == encoding.eot_token
    assert given["verify"] is VERIFY["block"] and isinstance(given["propose"], DraftModel)
    noise = torch.full((64,), 1 / 64, device=DEVICE)
    assert given["choose"](noise) == seeded(9)(noise)
    assert not isinstance(asked("--drafter", "lookup")["propose"], DraftModel)
    assert asked()["tokens"] == encoding.encode_ordinary(micro_pair().prompts[0])


def test_device_threads_and_number_format_reach_the_loop(asked):
    given = asked("--threads", "2")  # after these come --device and --dtype float32
    assert given["target"].embed.dtype == torch.float32 and torch.get_num_threads() == 2
    assert given["target"].device.type == DEVICE.type


def test_the_files_hold_what_the_terminal_shows(kept, tmp_path, capsys):
    """The same text, told three ways."""
    options = ["def f", *kept, "--max-new", "12", "--seed", "3"]
    code, out, _ = ended(trace, [*options, "--json", tmp_path / "json"], capsys)
    assert code == 0
    both_files = ["--html", tmp_path / "page.html", "--json", tmp_path / "again"]
    code, said, _ = ended(trace, [*options, *both_files], capsys)
    assert code == 0 and said.endswith("page.html: open it in a browser\n")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "json").read_bytes()
    data = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "\n".join(trace.as_text(data)) + "\n" == out
    values = json.loads((tmp_path / "json").read_text(encoding="utf-8"))
    assert values["new_tokens"] == 12 and values["passes"] == len(values["rounds"])
    assert [one["new"] for one in values["rounds"]] == [
        [token["id"] for token in one["new"]] for one in data["rounds"]]


def test_nothing_to_write_is_no_error(kept, tmp_path, capsys):
    options = ["def", *kept, "--max-new", "0", "--json", tmp_path / "json"]
    code, _, err = ended(trace, options, capsys)
    assert (code, err) == (0, "")
    figures = json.loads((tmp_path / "json").read_text(encoding="utf-8"))
    assert figures == {**tally([]), "rounds": []} and figures["new_tokens"] == 0


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trace.program, "load_pair", forbidden)
    result = ended(trace, ["--html", tmp_path / "none" / "page.html"], capsys)
    assert is_one_clear_line(result, "page.html")
