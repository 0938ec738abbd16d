"""programs/decode.py: what is counted and timed of a text, what is printed, and what options do.

The clock stands still but for what the models are made to take: every figure is known before."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from micro import Clock, ended, is_one_clear_line, micro_pair
from model import GPT
from pair import Pair
from programs import decode
from programs.decode import (STYLES, compare, decode_speculative, print_comparison, print_text,
                             rates, stopwatch, tally)
from programs.options import Settings, about, parser_of, prepared, printable
from rigs import Spy, forbidden, saying
from sampling import verify_token
from specdec import Round, plain, speculative
from variants import verify_block
from vocabulary import make_encoding


def a_round(drafts, accepted, new):
    return Round(drafts, accepted, new, (0, 0, 0), None, None)


# ---------------------------------------------------------------- counts and the clock

ROUNDS = [a_round([1, 2, 3, 4], 2, [1, 2, 9]),  # corrected
          a_round([5, 6], 2, [5, 6, 7]),  # with a bonus
          a_round([], 0, [4]),  # nothing was drafted
          a_round([8, 0, 3], 2, [8, 0])]  # an accepted draft, 0, ended the text


@pytest.mark.parametrize("rule, alpha", [("token", 6 / 7), ("block", None), ("mine", None)])
def test_counts_are_of_what_joined_the_text(rule, alpha):
    """Of the first round three drafts were tested, of the last one two. The acceptance estimates
    alpha for the token rule alone."""
    assert tally(ROUNDS, rule) == dict(
        new_tokens=9, passes=4, drafted=9, accepted=6, corrections=1, bonuses=2, tested=7,
        tokens_per_pass=9 / 4, acceptance=6 / 7, alpha=alpha)
    assert tally([a_round([], 0, [4])] * 3)["acceptance"] == 0 == tally([])["tokens_per_pass"]


def test_a_stopwatch_waits_for_the_device_before_it_looks(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: seen.append("wait"))
    monkeypatch.setattr(decode.time, "perf_counter", lambda: seen.append("time") or len(seen))
    assert stopwatch(SimpleNamespace(type="cuda"))() == 2 and seen == ["wait", "time"]
    assert stopwatch(torch.device("cpu"))() == 3 and seen == ["wait", "time", "time"]


def test_rates_are_medians_and_speedups_are_within_a_repeat():
    """The median of the ratios is 2, their mean 2.5; the ratio of the medians would be 4. The
    spread is that of the way whose runs differ most."""
    assert rates(12, [2, 4, 6], [1, 1, 4]) == dict(
        plain_tokens_per_s=3, speculative_tokens_per_s=12, speedup=2, speedup_min=1.5,
        speedup_max=4, runs=3, spread=4)


@pytest.mark.parametrize("says, passes, seconds", [(5, 4, 4 + 15), (6, 12, 27 + 21)])
def test_both_ways_are_timed_once_they_are_warm(says, passes, seconds, monkeypatch):
    """For as many tokens, past an end of text. A pass takes a second, and so does each token that
    it reads; in the first runs, of both ways, 1000 more. A prompt of 4, and 12 new tokens, twice,
    with two seeds. Plainly: 12 passes over 4 + 11 tokens. With a draft that is always right: 4
    passes over 4 + 11. With one that is always wrong: 12 passes over 4 + 11, and 10 · 2 + 1 drafts.
    """
    clock, read, seeds, seeded = Clock(), [], [], decode.seeded

    def watch(held, ids):
        read.append(ids)
        clock.add(1 + len(ids) + 1000 * (len(read) <= 2 * (12 + passes)))

    monkeypatch.setattr(decode, "seeded", lambda device, seed: seeds.append(seed)
                        or seeded(device, seed))
    settings = Settings(12, gamma=2, top_k=3, seed=2 ** 63 - 1)
    pair = Pair(Spy(saying(5), watch), saying(says), SimpleNamespace(eot_token=5), [], {"a": 1})
    figures = compare(pair, [[1, 2, 3, 4]] * 2, settings, clock)
    assert len(read) == 4 * 2 * (12 + passes)  # three repeats, and one before them
    assert seeds == [settings.seed, settings.seed - 1] * 2 * 4
    expected = dict(
        **vars(settings), plain_new_tokens=24, new_tokens=24, passes=2 * passes, runs=3, spread=1,
        tokens_per_pass=12 / passes, plain_tokens_per_s=12 / 27,
        speculative_tokens_per_s=12 / seconds, speedup=27 / seconds, speedup_min=27 / seconds,
        speedup_max=27 / seconds)
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


# ---------------------------------------------------------------- the figures on the screen

FIGURES = dict(new_tokens=200, plain_new_tokens=200, passes=50, plain_tokens_per_s=100.0,
               speculative_tokens_per_s=250.0, speedup=2.5, speedup_min=2.25, speedup_max=2.75,
               runs=3, gamma=4, tokens_per_pass=4.0, accepted=150, drafted=199,
               corrections=30, bonuses=20)
WHOLE = [a_round([], 0, [1] * 200)]


def shown(figures, rounds, capsys):
    print_comparison(figures, rounds)
    return capsys.readouterr().out.splitlines()


def test_each_figure_is_shown_and_the_bars_are_to_scale(capsys):
    """In time: the slower way has the longer bar. A text that ended early is said to."""
    full = "█" * 30
    assert shown(FIGURES, WHOLE, capsys) == [
        f"plain       {full}   2000 ms  200 passes   100 tokens/s",
        f"speculative {full[:12]:30}    800 ms   50 passes   250 tokens/s",
        "2.50x (3 runs: 2.25 to 2.75) at γ = 4, 4.00 tokens a pass",
        "150 of 199 drafts kept, 30 corrections, 20 bonuses"]
    plain, speculative, *rest = shown(FIGURES | {"speculative_tokens_per_s": 50.0}, ROUNDS, capsys)
    assert f" {full[:15]:30}   2000 ms" in plain and f" {full}   4000 ms" in speculative
    assert "the text ended after 9 tokens; both ways were timed past that" in rest


def test_a_machine_is_busy_where_runs_of_one_way_differ_by_more_than_1_3(monkeypatch, capsys):
    pair = Pair(saying(5), saying(5), SimpleNamespace(eot_token=5), [], {})
    for spread, said in ((1.25, ""), (1.3125, "The machine is busy: its runs differ by 1.3 to 1. "
                                              "Try again.\n")):
        monkeypatch.setattr(decode, "rates", lambda *_: {"spread": spread})
        compare(pair, [[1]], Settings(2, gamma=1), Clock())
        assert capsys.readouterr().out == said


def strict(path):
    """A JSON file without NaN or infinity, which only some programs can read."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


@pytest.mark.parametrize("asked", [
    [], ["--temperature", 0], ["--drafter", "lookup"], ["--verify", "block"]], ids=str)
def test_screen_and_file_show_the_text_decoded_and_the_same_figures(asked, kept, tmp_path, capsys):
    """The losses stand beside the speedup."""
    file = tmp_path / "figures.json"
    arguments = list(map(str, ["def wrap(", *kept, "--max-new", 12, *asked]))
    code, out, err = ended(decode, [*arguments, "--json", file], capsys)
    pair, settings, tokens = prepared(parser_of("", arguments).parse_args(arguments))
    eos, figures = pair.encoding.eot_token, strict(file)
    rounds = list(decode_speculative(pair, tokens, settings, eos))
    text = pair.encoding.decode([x for one in rounds for x in one.new if x != eos])
    bits, spread = figures["bits_per_byte"]["target"], figures["spread"]
    busy = [f"The machine is busy: its runs differ by {spread:.1f} to 1. Try again."][:spread > 1.3]
    assert (code, err) == (0, "") and out.split("\n\n", 1) == [
        "written by: prompt draft correction bonus", "\n".join([
            "def wrap(" + printable(text), "", "timing both ways ...", *busy,
            *shown(figures, rounds, capsys), *about(pair).values(),
            "1e+06 minutes of training", ""])]
    assert f"target 2x32, {bits:.2f}; draft 1x32, " in out
    assert figures["rounds"] == [dict(drafts=one.drafts, accepted=one.accepted, new=one.new,
                                      writers=one.writers, cache=list(one.cache))
                                 for one in rounds]
    assert bits == micro_pair().bits_per_byte["target"]
    assert (figures["alpha"] is None) == (settings.verify == "block")


@pytest.mark.parametrize("prompt, new, gamma, refused", [
    ("1" * 510, 3, 3, None), ("1" * 512, 1, 3, None),  # these fill the context to the last token
    ("1", 4, 900, None), ("", 4, 3, None), ("1" * 510, 4, 3, "context of 512")])
def test_what_fits_is_decoded_and_what_does_not_is_refused_before_any_work(
        prompt, new, gamma, refused, kept, tmp_path, monkeypatch, capsys):
    if refused:
        monkeypatch.setattr(GPT, "forward", forbidden)
    arguments = [prompt, "--max-new", new, "--gamma", gamma, *kept, "--json", tmp_path / "file"]
    result = code, out, err = ended(decode, arguments, capsys)
    if refused:
        assert is_one_clear_line(result, refused)
    else:
        assert (code, err) == (0, "") and prompt in out
        assert sum(len(one["new"]) for one in strict(tmp_path / "file")["rounds"]) <= new


# ---------------------------------------------------------------- each option

SAMPLING = dict(temperature=1.0, top_k=None, top_p=1.0)
USUAL = dict(max_new=5, gamma=4, verify=verify_token, seed=0, threads=1, draft=SAMPLING,
             drafter="DraftModel", dtypes={torch.float32}, target=SAMPLING)
OPTIONS = {
    "": {}, "--max-new 7": dict(max_new=7), "--gamma 2": dict(gamma=2), "--seed 7": dict(seed=7),
    "--threads 3": dict(threads=3), "--verify block": dict(verify=verify_block),
    "--drafter lookup": dict(drafter="function", draft=None),
    "--dtype float64": dict(dtypes={torch.float64}),
    "--temperature 0.5": dict.fromkeys(("target", "draft"), SAMPLING | {"temperature": 0.5}),
    "--top-k 5": dict.fromkeys(("target", "draft"), SAMPLING | {"top_k": 5}),
    "--top-p 0.9": dict.fromkeys(("target", "draft"), SAMPLING | {"top_p": 0.9})}


@pytest.mark.parametrize("asked", OPTIONS)
def test_each_option_reaches_every_text_that_is_decoded(asked, kept, monkeypatch, capsys):
    """And nothing else does. The text that is printed, then both ways of the comparison in turn:
    once before the clock, and three times on it."""
    calls, ways, seeded = [], [], decode.seeded
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def recorded(way):
        def start(target, *given, warp, choose, eos=None, **more):
            *propose, tokens, max_new = given
            ways.append((way, eos))
            calls[-1] |= dict(more, max_new=max_new, target=warp.keywords, dtypes={
                model.embed.weight.dtype for model in (
                    target, *(one.model for one in propose if hasattr(one, "model")))})
            for one in propose:
                calls[-1] |= dict(drafter=type(one).__name__,
                                  draft=one.warp.keywords if hasattr(one, "warp") else None)
            return way(target, *given, warp=warp, choose=choose, eos=eos, **more)
        return start

    monkeypatch.setattr(decode, "seeded", lambda device, seed: calls.append(dict(
        seed=seed, threads=torch.get_num_threads())) or seeded(device, seed))
    monkeypatch.setattr(decode, "plain", recorded(plain))
    monkeypatch.setattr(decode, "speculative", recorded(speculative))
    arguments = ["def", *kept, "--max-new", 5, *asked.split()]  # of an option the last one counts
    assert ended(decode, arguments, capsys)[::2] == (0, "")
    eos = micro_pair().encoding.eot_token
    assert ways == [(speculative, eos)] + [(plain, None), (speculative, None)] * 4
    for call, (way, _) in zip(calls, ways, strict=True):
        assert call.items() <= (USUAL | OPTIONS[asked]).items() and len(call) == (
            len(USUAL) if way is speculative else 5)


BYTES = make_encoding([bytes([b]) for b in range(256)])  # a token a byte


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind, term, no_color", [
    ("terminal", "xterm", ""), ("terminal", "dumb", ""), ("terminal", "xterm", "1"),
    ("pipe", "xterm", ""), ("write and flush alone", "xterm", "")])
def test_tokens_are_shown_as_they_come_in_their_writers_style(kind, term, no_color, monkeypatch):
    """Where there are colours; elsewhere the text is plain."""
    def coming():
        yield a_round([98, 120], 1, [98, 99])
        assert screen.getvalue().rstrip("\x1b[0m")[-1] == "c"  # before the next round is asked for
        yield a_round([100], 1, [100, 101])
        yield a_round([], 0, [0xc3])  # half of a character

    screen = Terminal() if kind == "terminal" else io.StringIO()
    alone = SimpleNamespace(write=screen.write, flush=screen.flush)
    monkeypatch.setattr(sys, "stdout", alone if "alone" in kind else screen)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    print_text([97], coming(), BYTES)
    out, writers = screen.getvalue(), ("prompt", "draft", "correction", "draft", "bonus")
    coloured = "".join(f"\x1b[{STYLES[writer]}m{letter}\x1b[0m"
                       for letter, writer in zip("abcde", writers))
    half = f"\x1b[{STYLES['bonus']}m\x1b[0m\ufffd"  # told at the end
    if (kind, term, no_color) == ("terminal", "xterm", ""):
        assert out.endswith(f"\n\n{coloured}{half}\n") and len({*writers} & STYLES.keys()) == 4
    else:
        assert out == "written by: prompt draft correction bonus\n\nabcde\ufffd\n"
