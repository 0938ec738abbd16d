"""The trace tells what happened: in plain text, and in a page that stands alone."""

import functools
import math
import re
import sys
from html.parser import HTMLParser

import pytest
import torch

from rigs import DEVICE, random_gpt
from sampling import VERIFY, chooser, warp
from specdec import Round, draft_model, shown, speculative, trace_html, trace_text
from train_tiny import make_encoding

BYTES = [bytes([b]) for b in range(256)]
ENCODING = make_encoding([*BYTES, b"</script>", b"\n    ", b'<b x="&amp;">', " é🙂".encode()])
SCRIPT, INDENT, TAG, ACCENT, EOS = range(256, 261)
ESCAPE, HALF = 0x1B, 0xC3  # a control character, and the first byte of é
V = ENCODING.n_vocab


def a_round(drafted, accepted, new, seed=0):
    """A round as told, over random p and q."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(len(drafted) + 1, V, generator=generator, dtype=torch.float64).pow(8)
    q = torch.rand(len(drafted), V, generator=generator, dtype=torch.float64).pow(8)
    return Round(drafted, accepted, new, (p / p.sum(-1, keepdim=True)).to(DEVICE),
                 (q / q.sum(-1, keepdim=True)).to(DEVICE), (9, 14, 12))


ROUNDS = [
    a_round([SCRIPT, INDENT, ESCAPE, TAG], 2, [SCRIPT, INDENT, HALF]),  # a correction, after which é is half written
    a_round([0xA9, 13, ACCENT], 3, [0xA9, 13, ACCENT, TAG]),  # é is whole; a bonus
    a_round([], 0, [ESCAPE]),  # no drafts
    a_round([65, EOS, 66, 67], 2, [65, EOS]),  # a draft ends the text
]
# What became of the drafts, and how their coins fell where it mattered.
FATES = {
    "token": [["1 accepted", "1 accepted", "0 rejected", "- not tested"], ["1 accepted"] * 3, [],
              ["1 accepted", "1 accepted", "- after the end", "- after the end"]],
    "block": [["- accepted", "1 accepted", "0 rejected", "0 rejected"], ["- accepted", "- accepted", "1 accepted"], [],
              ["- accepted", "- accepted", "- after the end", "- after the end"]],
}
PROMPT = "if a <b and c> d:\n    "
TEXT = b"</script>\n    \xc3\xa9\r \xc3\xa9\xf0\x9f\x99\x82<b x=\"&amp;\">\x1bA".decode()


def text_of(rounds, verify="token"):
    return "\n".join(trace_text(PROMPT, rounds, ENCODING, verify))


def page_of(rounds, verify="token"):
    return trace_html(PROMPT, rounds, ENCODING, {"verify": verify, "top_k": None, "note": "<b>"})


class Page(HTMLParser):
    """What a reader's browser makes of a page: its elements, its links, and the text of the tokens by their writer."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.open, self.tokens, self.rows = [], [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        if tag not in ("meta", "p"):
            self.open.append(tag)
        if self.open[-2:] == ["a", "span"]:
            self.tokens.append((attributes["class"].split()[0], ""))
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-2:] == ["a", "span"]:
            writer, text = self.tokens[-1]
            self.tokens[-1] = writer, text + data
        if self.open[-1:] == ["td"]:
            self.rows[-1][-1] += data


@pytest.mark.parametrize("verify", VERIFY)
def test_every_draft_is_shown_with_its_coin_and_what_became_of_it(verify):
    for one, fates, told in zip(ROUNDS, FATES[verify], trace_text(PROMPT, ROUNDS, ENCODING, verify)):
        drafts = re.findall(r"^    (\S+)  .*(\S)  +(accepted|rejected|not tested|after the end)$", told, re.M)
        assert drafts == [(shown(x, ENCODING), *fate.split(" ", 1)) for x, fate in zip(one.drafted, fates)]


@pytest.mark.parametrize("verify", VERIFY)
def test_the_page_shows_the_rows_of_the_text(verify):
    rows = [row for row in Page(page_of(ROUNDS, verify)).rows if row]
    lines = [re.sub("█+", "", line).split() for line in text_of(ROUNDS, verify).split("\n")]
    assert rows
    for row in rows:
        assert " ".join(row).split() in lines


def test_the_coin_of_the_token_rule_is_shown_with_the_smaller_of_1_and_p_over_q():
    one = ROUNDS[0]
    expected = [f"{min(1, (one.p[i, x] / one.q[i, x]).item()):.3f}" for i, x in enumerate(one.drafted)]
    assert [line.split()[3] for line in text_of([one]).split("\n")[3:7]] == expected


def test_the_coin_of_the_block_rule_is_shown_with_keep_and_h():
    one, keep, expected = ROUNDS[0], 1.0, []
    for i, x in enumerate(one.drafted):
        keep = min(1, keep * (one.p[i, x] / one.q[i, x]).item())
        h = keep
        if i + 1 < len(one.drafted):
            pairs = zip(one.p[i + 1].tolist(), one.q[i + 1].tolist())
            Z = math.fsum(max(keep * p - q, 0) for p, q in pairs)
            h = Z / (Z + 1 - keep) if Z > 0 else 0
        expected.append([f"{keep:.3f}", f"{h:.3f}"])
    assert [line.split()[3:5] for line in text_of([one], "block").split("\n")[3:7]] == expected


def test_a_correction_is_shown_with_the_part_of_p_that_q_left():
    p, q = torch.tensor([[.5, .4, .1, 0], [1, 0, 0, 0]]), torch.tensor([[.2, .3, .5, 0]])
    one = Round([2], 0, [1], p.to(DEVICE), q.to(DEVICE), (0, 2, 1))
    told = text_of([one])
    assert "next  p      q      norm(max(0, p - q))" in told
    assert re.findall(r"^    \\x0(\d)  (\S+)  (\S+)  (\S+) (█+) *(\S*)$", told, re.M) == [
        ("0", "0.500", "0.200", "0.750", "█" * 15, ""),
        ("1", "0.400", "0.300", "0.250", "█" * 5, "correction"),
    ]


def test_a_correction_of_the_block_rule_is_shown_with_what_keep_times_p_has_over_q():
    p = torch.tensor([[.6, .3, .1], [.5, .3, .2], [1, 0, 0]])  # keep_1 = .3/.5 = .6, and .6 p = [.3, .18, .12]
    q = torch.tensor([[.3, .5, .2], [.1, .12, .78]])  # leaves [.2, .06, 0]
    told = text_of([Round([1, 2], 1, [1, 0], p.to(DEVICE), q.to(DEVICE), (0, 3, 2))], "block")
    assert "next  p      q      norm(max(0, 0.600 p - q))" in told
    assert re.findall(r"^    \\x0(\d)  (\S+)  (\S+)  (\S+) (█+) *(\S*)$", told, re.M) == [
        ("0", "0.500", "0.100", "0.769", "█" * 15, "correction"),
        ("1", "0.300", "0.120", "0.231", "█" * 5, ""),
    ]


def test_a_text_that_a_draft_ends_has_no_token_after_it():
    assert "next" in text_of(ROUNDS[:1]) and "next" not in text_of(ROUNDS[3:])


def test_a_bonus_is_shown_with_p():
    one = Round([2], 1, [2, 0], torch.tensor([[0, 0, 1, 0], [.75, .25, 0, 0]]).to(DEVICE),
                torch.tensor([[0, 0, 1.0, 0]]).to(DEVICE), (0, 2, 2))
    assert re.findall(r"^    \\x0(\d)  (\S+) (█+) *(\S*)$", text_of([one]), re.M) == [
        ("0", "0.750", "█" * 15, "bonus"), ("1", "0.250", "█" * 5, "")]


@pytest.mark.parametrize("verify", VERIFY)
def test_rounds_of_the_loop_are_told_with_the_score_and_the_cache(verify):
    target, draft = random_gpt(V, seed=1, context=64), random_gpt(V, seed=2, context=64)
    sharp = functools.partial(warp, temperature=0.5)
    choose = chooser(torch.Generator(DEVICE).manual_seed(0))
    rounds = list(speculative(target, draft_model(draft, sharp), [72, 105], 40, 4, sharp, choose, VERIFY[verify]))
    last = text_of(rounds, verify).split("\n\n")[-1]
    tested, accepted = sum(one.tested for one in rounds), sum(one.accepted for one in rounds)
    assert (f"so far: 40 tokens, {len(rounds)} target passes, {40 / len(rounds):.2f} tokens a pass, "
            f"{accepted}/{tested} accepted/tested") in last
    assert "target's cache: {} tokens before the pass, {} after it, {} after the rollback".format(*rounds[-1].cache) in last
    assert Page(page_of(rounds, verify)).rows


def test_text_outside_a_terminal_holds_no_control_characters():
    assert text_of(ROUNDS).replace("\n", "").isprintable()


def test_colours_are_for_terminals_without_no_color(monkeypatch):
    plain = text_of(ROUNDS)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert re.sub(r"\x1b\[\d*m", "", text_of(ROUNDS)) == plain != text_of(ROUNDS)
    monkeypatch.setenv("NO_COLOR", "1")
    assert text_of(ROUNDS) == plain


def test_the_tokens_of_the_page_spell_the_text():
    tokens = Page(page_of(ROUNDS)).tokens
    assert "".join(text for _, text in tokens) == TEXT
    assert [writer for writer, _ in tokens] == [writer for one in ROUNDS for writer in one.writers]


def test_a_character_that_the_text_ends_in_is_not_lost_on_the_page():
    assert Page(page_of(ROUNDS[:1])).tokens[-1] == ("correction", "\N{REPLACEMENT CHARACTER}")


def test_tokens_add_no_elements_to_the_page():
    allowed = "html meta title style header h1 p span b main i a section nav table tr th td script".split()
    page = Page(page_of(ROUNDS))
    assert {tag for tag, _ in page.elements} <= set(allowed)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert page.open == []


def test_the_page_fetches_nothing():
    source = page_of(ROUNDS)
    assert not re.search(r"https?:|src=|url\(|@import", source)
    assert {name for _, attributes in Page(source).elements for name in attributes} <= {
        "lang", "charset", "name", "content", "http-equiv", "class", "id", "href", "style"}
    for _, attributes in Page(source).elements:
        assert attributes.get("href", "#").startswith("#")


def test_every_link_of_the_page_leads_to_a_round():
    elements = Page(page_of(ROUNDS)).elements
    links = {attributes["href"][1:] for _, attributes in elements if "href" in attributes}
    assert links - {"0"} == {attributes["id"] for _, attributes in elements if "id" in attributes} == {"1", "2", "3", "4"}


def test_no_rounds_make_a_page_of_the_prompt():
    assert Page(page_of([])).tokens == []
    assert text_of([]) == ""
