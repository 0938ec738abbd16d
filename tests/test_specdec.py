"""specdec.py: the loop, its seams, the drafters, and the command line.

Models are real with random weights, or `Scripted` where a path has to be forced. That the text
follows the target's law is shown in test_exact_law.py.
"""

import contextlib
import functools
import io
import itertools
import json
import math
import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import program
import specdec
import train_tiny
from exact import EXACT, distance, law
from model import GPT, Config
from pair import Pair, load_pair, pair_path, save_pair
from program import Settings, race, rates, stopwatch, stream, tally, visible
from rigs import (DEVICE, MICRO, SOURCE, Scripted, ended, forbidden, greedy, identity_rig,
                  is_one_clear_line, micro_pair, quiet_pair, random_gpt, rules, saying, seeded,
                  text, times)
from sampling import VERIFY, Verdict, verify_block, verify_token, warp
from specdec import (DRAFTERS, DraftModel, Round, algorithm_1, compare, continuation, decode_plain,
                     decode_speculative, plain, prompt_lookup, speculative)
from vocabulary import END_OF_TEXT, make_encoding

ESCAPE = "\x1b"


def drafter_of(name, draft, warp, vocab=9):
    return DraftModel(draft, warp) if name == "model" else prompt_lookup(vocab, DEVICE)


both_drafters = pytest.mark.parametrize("drafter", ("model", "lookup"))
few_settings = pytest.mark.parametrize(
    "setting", (dict(), dict(temperature=0), dict(temperature=0.7, top_k=2, top_p=0.9)), ids=str)


def a_round(drafts, accepted, new):
    """A round of which only the ids are asked for."""
    return Round(drafts, accepted, new, 0, 0, 0, None, None, None)


# ---------------------------------------------------------------- the idea

def test_algorithm_1_gives_accepted_drafts_and_one_token_more():
    def certain(*script):
        return lambda tokens: F.one_hot(torch.tensor(script[len(tokens) - 1]), 10).double()

    p = certain(1, 2, 3, 4)
    assert algorithm_1(p, p, [0], 3, seeded()) == [1, 2, 3, 4]
    assert algorithm_1(p, certain(1, 7, 3, 4), [0], 3, seeded()) == [1, 2]
    assert algorithm_1(p, forbidden, [0], 0, seeded()) == [1]


def test_algorithm_1_leaves_the_text_it_is_given():
    tokens, uniform = [0, 1], lambda _: torch.full((3,), 1 / 3)
    algorithm_1(uniform, uniform, tokens, 2, seeded())
    assert tokens == [0, 1]


# ---------------------------------------------------------------- length

@pytest.mark.parametrize("gamma", (1, 4, 8))
@pytest.mark.parametrize("max_new", (0, 1, 2, 3, 6))
@both_drafters
def test_exactly_as_many_tokens_come_as_were_asked_for(drafter, max_new, gamma):
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    prompt = [3, 1, 4, 1, 5]
    expected = tuple(plain(target, prompt, max_new, greedy, seeded()))
    propose = drafter_of(drafter, draft, greedy)
    rounds = list(speculative(target, propose, prompt, max_new, gamma, greedy, seeded()))
    assert len(expected) == max_new and text(rounds) == expected
    assert all(len(one.drafts) <= gamma for one in rounds)
    if drafter == "model":
        assert all(one.accepted == len(one.drafts) for one in rounds)


def test_asking_for_no_token_draws_nothing():
    target, draft = identity_rig()
    assert list(plain(target, [0], 0, warp, forbidden)) == []
    assert list(speculative(target, DraftModel(draft, warp), [0], 0, 4, warp, forbidden)) == []


def test_a_drafter_is_asked_for_one_fewer_than_left():
    asked = []

    def propose(tokens, gamma, choose):
        asked.append((len(tokens), gamma))
        return torch.zeros(0, dtype=torch.long, device=DEVICE), torch.zeros(0, 10, device=DEVICE)

    list(speculative(saying(5), propose, [1], 6, 3, warp, seeded()))
    assert asked == [(1, 3), (2, 3), (3, 3), (4, 2), (5, 1), (6, 0)]


# ---------------------------------------------------------------- end of text in a round

EOS = 0
ENDS = {  # what target and draft say, gamma, the new tokens, who wrote them
    "first draft": ((EOS, 9, 9, 9, 9), (EOS, 9, 9, 9, 9), 4, (EOS,), ["draft"]),
    "second draft": ((7, EOS, 9, 9, 9), (7, EOS, 9, 9, 9), 4, (7, EOS), ["draft"] * 2),
    "last draft": ((7, 7, 7, EOS, 9), (7, 7, 7, EOS, 9), 4, (7, 7, 7, EOS), ["draft"] * 4),
    "draft before a rejection": ((7, EOS, 9, 9, 9), (7, EOS, 8, 8, 8), 4, (7, EOS), ["draft"] * 2),
    "correction": ((7, EOS, 9, 9, 9), (7, 9, 9, 9, 9), 4, (7, EOS), ["draft", "correction"]),
    "bonus": ((7, EOS, 9, 9, 9), (7, 9, 9, 9, 9), 1, (7, EOS), ["draft", "bonus"]),
}


@rules
@pytest.mark.parametrize("target, draft, gamma, new, writers", ENDS.values(), ids=ENDS.keys())
def test_nothing_follows_an_end_of_text(target, draft, gamma, new, writers, verify):
    """In the text or in any count."""
    target, propose = saying(*target), DraftModel(saying(*draft), warp)
    rounds = list(speculative(target, propose, [1], 9, gamma, warp, seeded(), verify, EOS))
    assert text(rounds) == new == tuple(plain(target, [1], 9, warp, seeded(), EOS))
    assert [writer for one in rounds for writer in one.writers] == writers
    counts, accepted = tally(rounds), writers.count("draft")
    assert counts["new_tokens"] == len(new) and counts["passes"] == 1
    assert counts["accepted"] == accepted
    assert counts["tested"] == accepted + writers.count("correction")


def test_token_id_zero_is_no_end_of_text_unless_said():
    rounds = speculative(saying(0), DraftModel(saying(0), warp), [1], 6, 4, warp, seeded())
    assert text(rounds) == (0,) * 6


# ---------------------------------------------------------------- the caches

def test_the_draft_cache_has_no_hole_after_a_full_acceptance():
    """The draft has not seen its own last token when all of its tokens are accepted."""
    target, draft = identity_rig(vocab_size=9, n_layer=2, context=64)
    passes, prompt = [], [3, 1, 4, 1, 5]
    target.register_forward_hook(lambda *_: passes.append(1))
    rounds = list(speculative(target, DraftModel(draft, warp), prompt, 40, 4, warp, seeded()))
    assert all(one.accepted == len(one.drafts) for one in rounds)
    assert len(passes) == len(rounds) == 8
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *text(rounds)]], device=DEVICE)
        fresh = draft(ids)[0].log_softmax(-1)
    seen = len(prompt)
    for one in rounds:
        expected = fresh[seen - 1:seen - 1 + len(one.drafts)]
        assert (one.q.log() - expected).abs().max() < 1e-10
        seen += len(one.new)


@rules
def test_each_pass_feeds_the_last_token_and_the_drafts(verify):
    """No more and no less, from the second pass on; the first feeds the prompt as well."""
    target, draft = random_gpt(9, 2, context=64), random_gpt(9, 1, 1, context=64)
    fed = []
    target.register_forward_pre_hook(lambda _, arguments: fed.append(arguments[0].shape[1]))
    propose = DraftModel(draft, warp)
    rounds = list(speculative(target, propose, [1, 2, 3], 40, 4, warp, seeded(), verify))
    assert fed == [3 + len(rounds[0].drafts)] + [1 + len(one.drafts) for one in rounds[1:]]
    length = 3
    for one, rows in zip(rounds, fed):
        assert one.cache_fed - one.cache_before == rows
        length += len(one.new)
        assert one.cache_kept == length - 1
        assert one.cache_fed - one.cache_kept == len(one.drafts) - one.accepted


def test_plain_decoding_feeds_each_token_once():
    target, fed = random_gpt(9, 2, context=64), []
    target.register_forward_pre_hook(lambda _, arguments: fed.append(arguments[0].shape[1]))
    list(plain(target, [1, 2, 3], 20, warp, seeded()))
    assert fed == [3] + [1] * 19


def test_the_draft_model_feeds_what_its_cache_lacks():
    """Round by round: tokens that are new to it, and each of its own drafts but the last."""
    target, draft = random_gpt(9, 2, context=64), random_gpt(9, 1, 1, context=64)
    fed = []
    draft.register_forward_pre_hook(lambda _, arguments: fed.append(arguments[0].shape[1]))
    rounds = list(speculative(target, DraftModel(draft, warp), [1, 2, 3], 40, 4, warp, seeded()))
    expected, read, length = [], 0, 3
    for one in rounds:
        if one.drafts:
            expected += [length - read] + [1] * (len(one.drafts) - 1)
            read = length + min(one.accepted, len(one.drafts) - 1)
        length += len(one.new)
    assert fed == expected


# ---------------------------------------------------------------- context edge

@pytest.mark.parametrize("drafter", ("model of 16", "model of 12", "lookup"))
def test_a_text_may_fill_the_context_to_the_last_token(drafter):
    """17 positions are named and 16 are fed: the last token of a text is never fed."""
    target, prompt = random_gpt(9, n_layer=2, context=16), [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]
    draft = random_gpt(9, n_layer=2, context=12 if "12" in drafter else 16)
    propose = drafter_of(drafter.split()[0], draft, greedy)
    expected = tuple(plain(target, prompt, 7, greedy, seeded()))
    assert text(speculative(target, propose, prompt, 7, 4, greedy, seeded())) == expected


def test_texts_in_turn_share_no_cache():
    """Every draft of an identity rig is accepted, as long as each drafter has a cache of its own."""
    target, draft = identity_rig(vocab_size=9, n_layer=2, context=64)
    texts = [speculative(target, DraftModel(draft, warp), prompt, 24, 4, warp, seeded())
             for prompt in ([3, 1, 4], [1, 5, 2, 6, 5])]
    for one, other in zip(*texts, strict=True):
        assert one.accepted == len(one.drafts) and other.accepted == len(other.drafts)


@pytest.mark.parametrize("length, drafts", ((8, 4), (9, 4), (10, 3), (12, 1), (13, 0), (16, 0)))
def test_a_draft_model_drafts_up_to_the_end_of_its_context(length, drafts):
    """12 tokens are fed at most, and the last draft is not."""
    propose = DraftModel(random_gpt(9, context=12), greedy)
    drafted, q = propose([3] * length, 4, seeded())
    assert len(drafted) == len(q) == drafts


def test_a_draft_whose_context_ends_before_the_prompt_drafts_nothing():
    """And harms nothing."""
    target, draft, prompt = random_gpt(9, n_layer=2), random_gpt(9, context=4), [3, 1, 4, 1, 5]
    rounds = list(speculative(target, DraftModel(draft, greedy), prompt, 4, 4, greedy, seeded()))
    assert text(rounds) == tuple(plain(target, prompt, 4, greedy, seeded()))
    assert tally(rounds)["drafted"] == 0


def test_a_text_that_does_not_fit_is_refused_before_work():
    target = random_gpt(context=16)
    target.register_forward_pre_hook(forbidden)
    for prompt, max_new in (([0] * 10, 8), ([0] * 18, 0), ([], 1)):
        for decoding in (plain(target, prompt, max_new, warp, forbidden),
                         speculative(target, forbidden, prompt, max_new, 4, warp, forbidden)):
            with pytest.raises(ValueError, match="context" if prompt else "empty"):
                list(decoding)


# ---------------------------------------------------------------- p and q of a round

def first_token_law(target, make_drafter, warp=warp, verify=verify_token):
    """The exact law of the first token of a text that starts with a draft."""
    def program(choose):
        return text(speculative(target, make_drafter(warp), [0], 2, 1, warp, choose, verify))[0]

    return law(program)


@rules
@pytest.mark.parametrize("setting, expected", [
    (dict(top_k=2), [0.625, 0.375, 0]), (dict(top_p=0.7), [0.625, 0.375, 0]),
    (dict(temperature=0), [1, 0, 0]), (dict(temperature=0.5), [25 / 38, 9 / 38, 4 / 38])], ids=str)
def test_the_text_follows_the_warped_target(setting, expected, verify):
    """Where both sides are warped."""
    target, draft = Scripted([[0.5, 0.3, 0.2]]), Scripted([[0.4, 0.35, 0.25]])
    found = first_token_law(target, functools.partial(DraftModel, draft),
                            functools.partial(warp, **setting), verify)
    assert distance(found, dict(enumerate(expected))) < EXACT


@rules
def test_a_drafter_that_always_says_the_same_changes_no_law(verify):
    def always_one(warp):
        def propose(tokens, gamma, choose):
            drafted = torch.ones(gamma, dtype=torch.long, device=DEVICE)
            return drafted, F.one_hot(drafted, 3).double()
        return propose

    found = first_token_law(Scripted([[0.6, 0.3, 0.1]]), always_one, warp, verify)
    assert distance(found, {0: 0.6, 1: 0.3, 2: 0.1}) < EXACT


@pytest.mark.parametrize("tokens", ([1, 2, 1], [1, 2, 1, 2, 1, 2]), ids=str)
def test_a_drafter_without_draws_gives_a_one_hot_q(tokens):
    drafted, q = prompt_lookup(3, DEVICE)(tokens, 3, forbidden)
    assert len(drafted) > 0
    assert torch.equal(q.argmax(-1), drafted) and torch.equal(q.sum(-1), q.amax(-1))
    drafted, q = DraftModel(random_gpt(), greedy)(tokens, 3, seeded())
    assert torch.equal(q, F.one_hot(drafted, 3).to(q.dtype))


@rules
def test_each_row_of_the_target_judges_its_own_draft(verify):
    propose = DraftModel(saying(5), warp)
    rounds = list(speculative(saying(6), propose, [1], 8, 1, warp, seeded(), verify))
    assert rounds[0].drafts == [5] and rounds[0].new == [6]
    script = (1, 2, 3, 4, 5, 6, 7, 8)  # each row says something else: a row one place off shows
    propose = DraftModel(saying(*script), warp)
    rounds = list(speculative(saying(*script), propose, [0], 8, 3, warp, seeded(), verify))
    assert text(rounds) == script and len(rounds) == 2


@rules
def test_a_draft_that_is_always_wrong_costs_speed_alone(verify):
    propose = DraftModel(saying(5), warp)
    rounds = list(speculative(saying(6), propose, [1], 8, 4, warp, seeded(), verify))
    assert text(rounds) == (6,) * 8 == tuple(plain(saying(6), [1], 8, warp, seeded()))
    assert len(rounds) == 8 and tally(rounds)["accepted"] == 0


def test_a_round_shows_its_verdict_p_and_q():
    target, draft = Scripted([[0.6, 0.3, 0.1]]), Scripted([[0.3, 0.5, 0.2]])
    one = next(speculative(target, DraftModel(draft, warp), [0], 9, 2, warp, seeded()))
    assert one.p.shape == (3, 3) and one.q.shape == (2, 3)
    assert torch.allclose(one.p, torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64, device=DEVICE))
    assert torch.allclose(one.q, torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64, device=DEVICE))
    assert (one.verdict.n.item(), one.verdict.token.item()) == (one.accepted, one.new[-1])
    chances = [min(1, one.p[0, x].item() / one.q[0, x].item()) for x in one.drafts]
    assert one.verdict.columns["chance"].tolist() == pytest.approx(chances)


# ---------------------------------------------------------------- modes, near ties

@pytest.mark.parametrize("mode", (True, False), ids=("train", "eval"))
def test_a_model_decodes_the_same_in_either_mode(mode):
    """And stays in it, also after an exception."""
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    expected = tuple(plain(target.eval(), [1], 9, greedy, seeded()))
    for model in (target, draft):
        model.train(mode)

    def both_ways(choose):
        return (plain(target, [1], 9, greedy, choose),
                speculative(target, DraftModel(draft, greedy), [1], 9, 4, greedy, choose))

    for _ in range(2):
        ids, rounds = both_ways(seeded())
        assert tuple(ids) == text(rounds) == expected
    for decoding in both_ways(forbidden):
        with pytest.raises(AssertionError):
            list(decoding)
    assert all(module.training == mode for model in (target, draft) for module in model.modules())


@rules
def test_greedy_text_is_the_same_with_and_without_speculation(verify):
    """Random weights put logits close together. In float64 a difference of shape or order never
    decides."""
    for seed in range(30):
        target = random_gpt(20, 2, seed, spread=0.3)
        draft = random_gpt(20, 1, seed + 1000, spread=0.3)
        expected = tuple(plain(target, [seed % 20], 15, greedy, seeded()))
        for propose in (DraftModel(draft, greedy), prompt_lookup(20, DEVICE)):
            rounds = speculative(target, propose, [seed % 20], 15, 4, greedy, seeded(), verify)
            assert text(rounds) == expected


# ---------------------------------------------------------------- misuse of the seams

def says(drafted, q):
    return lambda tokens, gamma, choose: (torch.tensor(drafted, device=DEVICE), q.to(DEVICE))


UNIFORM = torch.full((5, 10), 0.1)
MISUSED = {  # a drafter, and what the message must say of it
    "more drafts than asked": (says([1, 2, 3, 4, 5], UNIFORM), ["at most 3", "(5,)"]),
    "more drafts than are left": (says([1, 2, 3], UNIFORM[:3]), ["at most 2", "(3,)"]),
    "drafts in two dimensions": (says([[1, 2, 3]], UNIFORM[:3]), ["(n,)", "(1, 3)"]),
    "drafts and q in three": (says([[1, 2, 3]], UNIFORM[None, :3]), ["(n,)", "(1, 3, 10)"]),
    "a single draft": (says(1, UNIFORM[:1]), ["(n,)", "()"]),
    "a row of q too few": (says([1, 2, 3], UNIFORM[:2]), ["(n, 10)", "(3,) and (2, 10)"]),
    "a row of q too many": (says([1, 2], UNIFORM[:3]), ["(n, 10)", "(2,) and (3, 10)"]),
    "q of fewer tokens": (says([1, 2], UNIFORM[:2, :8]), ["(n, 10)", "(2,) and (2, 8)"]),
    "q of one dimension": (says([1], UNIFORM[0]), ["(n, 10)", "(1,) and (10,)"]),
    "a negative id": (says([1, -1], UNIFORM[:2]), ["[1, -1]", "from 0 to 9"]),
    "an id beyond the vocabulary": (says([10, 1], UNIFORM[:2]), ["[10, 1]", "from 0 to 9"]),
}


@rules
@pytest.mark.parametrize("what", MISUSED)
def test_a_drafter_that_breaks_its_contract_is_refused(what, verify):
    """At once, with a message that says what is wrong: nothing of its round joins the text."""
    propose, said = MISUSED[what]
    new = 3 if "left" in what else 9
    rounds = speculative(saying(1), propose, [1], new, 3, warp, seeded(), verify)
    with pytest.raises(ValueError) as error:
        next(rounds)
    assert all(word in str(error.value) for word in said), error.value


def test_after_each_round_the_cache_lacks_the_last_token_alone():
    """Also where an end of text among the accepted drafts cuts the round short."""
    cut = 0
    for seed in range(20):
        target, draft = identity_rig(vocab_size=9, n_layer=2)
        length, propose = 1, DraftModel(draft, warp)
        for one in speculative(target, propose, [1], 12, 4, warp, seeded(seed), eos=8):
            length += len(one.new)
            cut += len(one.new) < len(one.drafts)
            assert one.cache_kept == length - 1
    assert cut > 3


@pytest.mark.parametrize("size, tokenizer, said", [
    (48, "one", "64 tokens in the target, 48 in the draft"),
    (64, "other", "64 tokens in the target, 64 in the draft, and not the same ones")])
def test_a_draft_of_another_vocabulary_is_refused_before_work(size, tokenizer, said):
    target = GPT(Config(64, 16, n_embd=8, tokenizer="one")).to(DEVICE)
    draft = GPT(Config(size, 16, n_embd=8, tokenizer=tokenizer)).to(DEVICE)
    for model in (target, draft):
        model.register_forward_pre_hook(forbidden)
    with pytest.raises(ValueError, match=f"vocabularies differ.*{said}"):
        next(speculative(target, DraftModel(draft, warp), [0], 5, 2, warp, forbidden))


@rules
@few_settings
@pytest.mark.parametrize("side", ("target", "draft"))
@pytest.mark.parametrize("after", (0, 3))
def test_nan_logits_are_an_error_and_never_a_token(after, side, setting, verify):
    """NaN in one logit, in the first round or in a later one."""
    good, bad = [[0.6, 0.3, 0.1]], [[0.6, 0.3, 0.1]] * after + [[0.6, math.nan, 0.1]]
    target, draft = (Scripted(bad if side == name else good) for name in ("target", "draft"))
    shape, before = functools.partial(warp, **setting), []
    propose = DraftModel(draft, shape)
    with pytest.raises(ValueError, match="NaN"):
        for one in speculative(target, propose, [0], 9, 2, shape, seeded(), verify):
            before += one.new
    assert len(before) <= after
    if side == "target":
        ids = plain(target, [0], 9, shape, seeded())
        assert len(list(itertools.islice(ids, after))) == after
        with pytest.raises(ValueError, match="NaN"):
            next(ids)


# ---------------------------------------------------------------- prompt lookup

def naive_continuation(tokens):
    """Try every suffix, the longest first, at every earlier place, the latest first."""
    for n in range(len(tokens) - 1, 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start:start + n] == tokens[-n:]:
                return tokens[start + n:]
    return []


@times(5)
@given(st.lists(st.integers(0, 3), max_size=30))
@example([])
@example([2])
@example([2, 2])
@example([1, 2, 1, 2, 1])
def test_lookup_continues_the_latest_occurrence_of_the_longest_suffix(tokens):
    before = list(tokens)
    assert continuation(tokens) == naive_continuation(tokens)
    assert tokens == before


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 5))
def test_lookup_is_certain_of_each_token_that_it_drafts(tokens, gamma):
    drafted, q = prompt_lookup(4, DEVICE)(tokens, gamma, forbidden)
    assert drafted.tolist() == naive_continuation(tokens)[:gamma]
    assert torch.equal(q, F.one_hot(drafted, 4).float())


def test_lookup_is_by_the_book_for_all_short_texts():
    for length in range(8):
        for tokens in map(list, itertools.product(range(2), repeat=length)):
            assert continuation(tokens) == naive_continuation(tokens)


@pytest.mark.parametrize("tokens, eos, drafts", [
    ([5, 1, 2, 3, 5], None, [1, 2, 3, 5]), ([5, 1, 2, 3, 5], 2, [1, 2]),
    ([5, 2, 1, 3, 5], 2, [2]), ([5, 1, 0, 3, 5], 0, [1, 0]),
    ([5, 1, 0, 3, 5], None, [1, 0, 3, 5]), ([1, 2, 3], 3, [])], ids=str)
def test_lookup_drafts_nothing_behind_an_end_of_text(tokens, eos, drafts):
    for gamma in range(6):
        drafted, q = prompt_lookup(9, DEVICE, eos)(tokens, gamma, forbidden)
        assert drafted.tolist() == drafts[:gamma]
        assert torch.equal(q, F.one_hot(drafted, 9).float())


def test_the_lookup_of_a_pair_knows_its_end_of_text():
    pair = micro_pair()
    eos = pair.encoding.eot_token
    drafted, q = DRAFTERS["lookup"](pair, warp)([5, eos, 7, 8, 5], 4, forbidden)
    assert drafted.tolist() == [eos] and q.shape == (1, pair.encoding.n_vocab)


# ---------------------------------------------------------------- one read a round

class Waits(TorchDispatchMode):
    """Counts the operations that give the host a value of a tensor, so that it has to wait for the
    device."""
    NAMES = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        # t[mask] has the size that the mask decides.
        masks = args[1] if name in ("index", "index_put_") else ()
        masked = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if name in self.NAMES or masked:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts the methods that copy a tensor to the host: they run below what Waits sees."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def reads_of(work):
    """(what work() gives, the names of all reads from device to host that it does)"""
    seen = []
    with Waits(seen), Copies(seen):
        result = work()
    return result, seen


READS = {
    "item": torch.Tensor.item, "bool": bool, "int": int, "float": float, "cpu": torch.Tensor.cpu,
    "tolist": torch.Tensor.tolist, "nonzero": torch.Tensor.nonzero, "format": "{}".format,
    "range": range, "numpy": lambda one: one.view(1).numpy(force=True),
    "mask": lambda one: one.view(1)[one.view(1) > 0], "index": lambda one: [1, 2, 3][one],
    "equal": lambda one: torch.equal(one, one), "in": lambda one: 1 in one.view(1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("mode", (torch.inference_mode, contextlib.nullcontext),
                         ids=("inference", "normal"))
def test_the_counter_of_reads_counts(read, mode):
    def work():
        with mode():
            return read(torch.tensor(1, device=DEVICE))

    assert len(reads_of(work)[1]) == 1
    assert reads_of(lambda: torch.tensor([1, 2, 3], device=DEVICE).cumsum(0).argmax(-1))[1] == []


@rules
@both_drafters
@few_settings
def test_a_round_reads_from_the_device_once(setting, drafter, verify):
    target, draft, shape = random_gpt(9, 2), random_gpt(9, 1, 1), functools.partial(warp, **setting)
    propose, choose = drafter_of(drafter, draft, shape), seeded()

    def rounds():
        return list(speculative(target, propose, [1, 2, 1], 12, 4, shape, choose, verify, 8))

    done, reads = reads_of(rounds)
    assert reads == ["tolist"] * len(done)
    tokens, reads = reads_of(lambda: list(plain(target, [1, 2, 1], 12, shape, choose, 8)))
    assert reads == ["tolist"] * len(tokens)


# ---------------------------------------------------------------- operations

# Where a device takes about as long for a small operation as for none, their number is the time.
A_LAYER, A_DRAFT_STEP, A_DRAW, TOKEN_RULE, BLOCK_RULE = 12, 19, 3, 24, 46


class Operations(TorchDispatchMode):
    """Counts what a device is given to do: every operation but views of what is there, and memory
    that is asked for."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, results = func.overloadpacket.__name__, func._schema.returns
        view = any(one.alias_info and not one.alias_info.is_write for one in results)
        if not view and name not in ("detach_", "empty", "empty_like", "promote_types"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def operations(work):
    """How many a piece of work has."""
    seen = []
    with Operations(seen):
        work()
    return len(seen)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_layer_has_as_few_operations_as_stated(dtype):
    """While decoding: one token behind what a cache holds."""
    def one_token(n_layer):
        model = random_gpt(9, n_layer, dtype=dtype)
        cache, ids = model.new_cache(), torch.tensor([[1, 2, 3]], device=DEVICE)
        with torch.inference_mode():
            model(ids, cache, 1)
            return operations(lambda: model(ids[:, :1], cache, 1))

    assert one_token(2) - one_token(1) == one_token(3) - one_token(2) == A_LAYER


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_draft_step_has_as_few_operations_as_stated(dtype):
    """One layer, its softmax and its draw."""
    def drafts(gamma):
        propose, choose = DraftModel(random_gpt(9, 1, dtype=dtype), warp), seeded()
        propose([1, 2, 3], 1, choose)
        return operations(lambda: propose([1, 2, 3, 4], gamma, choose))

    assert drafts(4) - drafts(3) == drafts(3) - drafts(2) == A_DRAFT_STEP


def test_a_rule_has_as_few_operations_as_stated():
    """Over four drafts, with its two draws."""
    p, q = (torch.full((n, 9), 1 / 9, device=DEVICE) for n in (5, 4))
    drafted, choose = torch.tensor([0, 1, 2, 3], device=DEVICE), seeded()
    assert operations(lambda: choose(p)) == A_DRAW
    assert operations(lambda: verify_token(p, q, drafted, choose)) == TOKEN_RULE
    assert operations(lambda: verify_block(p, q, drafted, choose)) == BLOCK_RULE


# ---------------------------------------------------------------- counts

def test_coins_after_the_first_rejection_are_not_counted():
    one = a_round([0, 1, 2, 0], 1, [0, 2])
    assert one.writers == ["draft", "correction"] and one.tested == 2
    assert tally([one]) == dict(new_tokens=2, passes=1, drafted=4, tested=2, accepted=1,
                                tokens_per_pass=2, alpha=0.5)


def test_a_clipped_last_round_counts_as_it_was():
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    rounds = list(speculative(target, DraftModel(draft, warp), [1], 7, 4, warp, seeded()))
    assert tally(rounds) == dict(new_tokens=7, passes=2, drafted=5, tested=5, accepted=5,
                                 tokens_per_pass=3.5, alpha=1)


def test_a_text_without_drafts_has_no_alpha_above_zero():
    assert tally([a_round([], 0, [4])] * 3)["alpha"] == 0


@rules
def test_the_counts_of_a_text_add_up(verify):
    """Each pass adds one token of the target's own."""
    target, draft = random_gpt(9, 2, context=64), random_gpt(9, 1, 1, context=64)
    rounds = list(speculative(target, DraftModel(draft, warp), [1], 50, 4, warp, seeded(), verify))
    counts = tally(rounds)
    assert counts["new_tokens"] == 50 == counts["accepted"] + counts["passes"]
    assert counts["accepted"] <= counts["tested"] <= counts["drafted"]
    corrections = sum(one.writers[-1] == "correction" for one in rounds)
    assert counts["tested"] - counts["accepted"] == corrections


# ---------------------------------------------------------------- the clock

def test_a_stopwatch_waits_for_the_device_before_it_looks(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: seen.append("wait"))
    monkeypatch.setattr(program.time, "perf_counter", lambda: seen.append("time") or len(seen))
    assert stopwatch(SimpleNamespace(type="cuda"))() == 2 and seen == ["wait", "time"]
    assert stopwatch(torch.device("cpu"))() == 3 and seen == ["wait", "time", "time"]


class Clock:
    """Time that passes only where it is said to."""

    def __init__(self):
        self.seconds, self.looks = 0.0, 0

    def __call__(self):
        self.looks += 1
        return self.seconds


def test_a_race_runs_in_turn_and_times_the_whole_way():
    clock, ran = Clock(), []

    def way(name, seconds):
        def decode():
            ran.append(name)
            for second in seconds[ran.count(name) - 1]:
                clock.seconds += second
                yield f"{name}{ran.count(name)}"
        return decode

    ways = [way("a", [[1, 1], [2], [3, 4]]), way("b", [[5], [6, 7], [8]])]
    given, seconds = race(ways, clock)
    assert ran == ["a", "b"] * 3
    assert given == [["a3", "a3"], ["b3"]] and seconds == [[2, 2, 7], [5, 13, 8]]


def test_rates_are_medians_and_speedups_are_within_a_repeat():
    """The median of the ratios is 3; the ratio of the medians would be 4."""
    assert rates(12, [2, 4, 9], [1, 1, 3]) == dict(
        plain_tokens_per_s=3, speculative_tokens_per_s=12, speedup=3, speedup_min=2, speedup_max=4,
        runs=3)


def test_a_slowdown_is_told_as_one():
    assert rates(10, [1, 1, 2], [2, 4, 4])["speedup"] == 0.5


class Paced:
    """A model around another: each pass takes a second, and so does each row that it is fed."""

    def __init__(self, model, clock):
        self.model, self.clock, self.passes = model, clock, 0
        self.config, self.device, self.new_cache = model.config, model.device, model.new_cache

    def __call__(self, ids, cache, rows):
        self.passes += 1
        self.clock.seconds += 1 + ids.shape[1]
        return self.model(ids, cache, rows)


def paced_pair(target, draft, clock):
    encoding = SimpleNamespace(eot_token=9, n_vocab=10)
    return Pair(Paced(target, clock), draft, encoding, {}, [], None, 2)


def test_both_ways_are_compared_for_as_many_tokens():
    """A prompt of 4, and 12 new tokens. Plainly: 12 passes over 4 + 11 rows, 27 seconds. With a
    draft that is always right, 4 rounds of 2 drafts: 4 passes over 4 + 11 rows, 19 seconds. With
    one that is always wrong, 12 passes, ten with 2 drafts and one with 1: 27 + 21 seconds."""
    for says, passes, seconds in ((5, 4, 4 + 15), (6, 12, 27 + 21)):
        clock = Clock()
        pair = paced_pair(saying(5), saying(says), clock)
        figures = compare(pair, [1, 2, 3, 4], Settings(12, gamma=2), clock)
        assert figures["plain_new_tokens"] == figures["new_tokens"] == 12
        assert figures["passes"] == passes and figures["tokens_per_pass"] == 12 / passes
        assert figures["plain_tokens_per_s"] == pytest.approx(12 / 27)
        assert figures["speculative_tokens_per_s"] == pytest.approx(12 / seconds)
        assert figures["speedup"] == pytest.approx(27 / seconds)
        assert pair.target.passes == 4 * (12 + passes)  # three repeats, and one before them
        assert clock.looks == 2 * 2 * 4  # on both sides of each way in each


def test_both_ways_are_timed_past_an_end_of_text():
    clock = Clock()
    figures = compare(paced_pair(saying(9), saying(9), clock), [1], Settings(8, gamma=3), clock)
    assert figures["plain_new_tokens"] == figures["new_tokens"] == 8


def test_the_first_run_of_each_way_is_not_timed():
    """It is slow: here each pass takes longer, the first time that it is made."""
    clock = Clock()
    pair = paced_pair(saying(5), saying(5), clock)
    seen, once = set(), pair.target.model

    def slow_at_first(ids, cache, rows):
        if (rows, cache.length) not in seen:
            clock.seconds += 1000
        seen.add((rows, cache.length))
        return once(ids, cache, rows)

    pair.target.model = slow_at_first
    figures = compare(pair, [1, 2, 3, 4], Settings(12, gamma=2), clock)
    assert figures["speedup_min"] == figures["speedup_max"] == pytest.approx(27 / 19)


def test_the_settings_are_among_the_figures():
    clock = Clock()
    settings = Settings(5, gamma=2, temperature=0.5, top_k=3, seed=7, verify="block")
    figures = compare(paced_pair(saying(5), saying(5), clock), [1], settings, clock)
    assert {name: figures[name] for name in vars(settings)} == vars(settings)


# ---------------------------------------------------------------- command line: what is refused

OUT_OF_RANGE = {
    "gamma": ("0", "-3"), "temperature": ("-1", "nan", "inf", "-inf"), "top-k": ("0", "-1"),
    "top-p": ("0", "-0.1", "1.5", "nan", "inf"), "max-new": ("-1",), "threads": ("0", "-2"),
    "seed": ("-1", str(2 ** 63), str(2 ** 64), str(-2 ** 64)), "device": ("tpu",)}


@pytest.mark.parametrize("option, value", [
    (option, value) for option, values in OUT_OF_RANGE.items() for value in values])
def test_a_value_out_of_range_is_one_clear_line(option, value, kept, monkeypatch, capsys):
    """Before any work."""
    monkeypatch.setattr(GPT, "forward", forbidden)
    assert is_one_clear_line(ended(specdec, ["def", *kept, f"--{option}={value}"], capsys), option)


@pytest.mark.parametrize("option, value", [
    ("gamma", "four"), ("temperature", "hot"), ("verify", "none"), ("drafter", "me"),
    ("dtype", "float8"), ("threads", "all")])
def test_a_value_that_is_not_one_names_its_option(option, value, kept, capsys):
    code, out, err = ended(specdec, ["def", *kept, f"--{option}={value}"], capsys)
    assert (code, out) == (2, "") and f"--{option}" in err and "Traceback" not in err


@pytest.mark.parametrize("prompt, max_new", [("1" * 510, 4), ("def", 600), ("1" * 600, 0)],
                         ids=("a long prompt", "many tokens", "too long by itself"))
def test_a_text_longer_than_the_context_is_refused(prompt, max_new, kept, monkeypatch, capsys):
    monkeypatch.setattr(GPT, "forward", forbidden)
    result = ended(specdec, [prompt, *kept, "--max-new", max_new], capsys)
    assert is_one_clear_line(result, "context of 512")


def test_a_file_for_figures_that_cannot_be_written_is_refused(kept, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(GPT, "forward", forbidden)
    for path in (tmp_path, tmp_path / "no such directory" / "figures.json"):
        result = ended(specdec, ["def", *kept, "--max-new", 2, "--json", path], capsys)
        assert is_one_clear_line(result, path.name)


# ---------------------------------------------------------------- command line: what is decoded

def strict(path):
    """A JSON file without NaN or infinity, which only some programs can read."""
    return json.loads(path.read_text(encoding="utf-8"),
                      parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def prepared(arguments):
    """(pair, settings, tokens) as the program makes them of a command line."""
    parser = program.decoding_parser("", DRAFTERS)
    return program.prepared(parser.parse_args([str(argument) for argument in arguments]))


def written(out):
    """What a run printed of the text itself, without the comparison after it."""
    return re.split(r"\n+ +tokens/s", out)[0]


@pytest.mark.parametrize("options", [
    [], ["--temperature", "0"], ["--temperature", "0.7", "--top-k", "20", "--top-p", "0.9"],
    ["--drafter", "lookup"], ["--verify", "block", "--gamma", "1"], ["--seed", "7"]], ids=" ".join)
def test_the_text_printed_is_the_text_decoded(options, kept, capsys):
    arguments = ["def wrap(", *map(str, kept), "--max-new", "12", *options]
    code, out, err = ended(specdec, arguments, capsys)
    assert (code, err) == (0, "")
    pair, settings, tokens = prepared(arguments)
    assert tokens == pair.encoding.encode_ordinary("def wrap(")
    eos = pair.encoding.eot_token
    ids = [token for token in text(decode_speculative(pair, tokens, settings, eos)) if token != eos]
    assert written(out) == "def wrap(" + visible(pair.encoding.decode(ids), lines=True)


def test_the_default_seed_gives_the_same_text_again(kept, capsys):
    """And another seed another text."""
    texts = [written(ended(specdec, ["def", *kept, "--max-new", "20", *seed], capsys)[1])
             for seed in ([], ["--seed", "0"], ["--seed", "1"])]
    assert texts[0] == texts[1] != texts[2]


def test_greedy_text_is_the_one_of_plain_decoding(kept, capsys):
    options = [*kept[:-1], "float64", "--max-new", "20", "--temperature", "0"]
    _, out, _ = ended(specdec, ["def", *options], capsys)
    pair = load_pair(kept[1], DEVICE, torch.float64)
    ids = list(decode_plain(pair, pair.encoding.encode_ordinary("def"), Settings(20, temperature=0),
                            pair.encoding.eot_token))
    plain_text = pair.encoding.decode(ids).removesuffix(END_OF_TEXT)
    assert written(out) == "def" + visible(plain_text, lines=True)


FITTING = {
    "all but three": ["1" * 510, "--max-new", "3"],  # these two fill the context to the last token
    "all but one": ["1" * 512, "--max-new", "1"],
    "large gamma": ["1", "--max-new", "4", "--gamma", "1000"],
    "one token": ["1", "--max-new", "1"],
    "no token": ["1", "--max-new", "0"],
    "lookup": ["1", "--max-new", "4", "--drafter", "lookup"],
    "empty prompt": ["", "--max-new", "4"],
    "odd prompt": ["é🙂\0", "--max-new", "4"],
}


@pytest.mark.parametrize("arguments", FITTING.values(), ids=FITTING.keys())
def test_what_fits_is_decoded_and_measured(arguments, kept, tmp_path, capsys):
    path = tmp_path / "figures.json"
    code, out, err = ended(specdec, [*arguments, *kept, "--json", path], capsys)
    assert (code, err) == (0, "") and out.startswith(visible(arguments[0], lines=True))
    assert len(text(SimpleNamespace(**one) for one in strict(path)["rounds"])) <= int(arguments[2])


def test_without_a_prompt_held_out_text_is_continued(kept, capsys):
    code, out, _ = ended(specdec, [*kept, "--max-new", "2"], capsys)
    assert code == 0 and out.startswith(micro_pair().prompts[0])


@pytest.mark.parametrize("typed", (END_OF_TEXT, f"a{END_OF_TEXT}b", END_OF_TEXT * 2, "<|endoftext",
                                   "<|fim_prefix|>", ""))
def test_an_end_of_text_typed_by_a_user_is_text(typed, kept, monkeypatch, capsys):
    """Only an empty prompt starts from it."""
    encoding, prompts = micro_pair().encoding, []
    ids = encoding.encode_ordinary(typed)
    assert encoding.eot_token not in ids and encoding.decode(ids) == typed
    monkeypatch.setattr(specdec, "decode_speculative",
                        lambda pair, tokens, *_, **__: prompts.append(tokens) or [])
    specdec.main([typed, "--max-new", "0", *map(str, kept)])
    assert prompts == [ids or [encoding.eot_token]] and capsys.readouterr().out.startswith(typed)


def test_the_gamma_that_suits_the_pair_is_said_where_none_was_asked_for(kept, tmp_path, capsys):
    path, gamma = tmp_path / "figures.json", micro_pair().gamma
    _, out, _ = ended(specdec, ["def", *kept, "--max-new", "5", "--json", path], capsys)
    assert f"gamma {gamma}\n" in out and strict(path)["gamma"] == gamma


def test_each_token_is_shown_as_soon_as_it_is_there(monkeypatch):
    shown = []

    class Screen(io.StringIO):
        def flush(self):
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Screen())
    encoding = micro_pair().encoding
    stream([], iter([a_round([], 0, [ord(letter)]) for letter in "abc"]), encoding)
    assert shown[-3:] == ["a", "ab", "abc"]


def streamed(encoding, ids, capsys):
    stream([], iter([a_round([], 0, [token]) for token in ids]), encoding)
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.parametrize("wanted", ("é🙂", "aé\u0301日本", "\n\n", "👩‍👩‍👧"))
def test_a_character_cut_in_two_does_not_stop_the_stream(wanted, capsys):
    encoding = make_encoding([*(bytes([b]) for b in range(256)), b"aa"])
    ids = encoding.encode_ordinary(wanted)
    assert streamed(encoding, ids, capsys) == wanted
    for some in range(len(ids)):
        assert streamed(encoding, ids[:some], capsys) == encoding.decode(ids[:some])
    assert streamed(encoding, [*ids, encoding.eot_token], capsys) == wanted


# ---------------------------------------------------------------- command line: each option

@pytest.fixture
def started(monkeypatch):
    """The arguments of every text that a run decodes, in order: as the loop is given them."""
    calls, seeded_by = [], []

    def recorded(way, parameters):
        def start(*arguments):
            call = dict(zip(parameters, arguments), way=way, threads=torch.get_num_threads(),
                        seed=seeded_by[-1])
            calls.append(SimpleNamespace(**call))
            return way(*arguments)
        return start

    def remembered(device, seed, seeded=specdec.seeded):
        seeded_by.append(seed)
        return seeded(device, seed)

    monkeypatch.setattr(specdec, "seeded", remembered)
    monkeypatch.setattr(specdec, "plain", recorded(plain, (
        "target", "tokens", "max_new", "warp", "choose", "eos")))
    monkeypatch.setattr(specdec, "speculative", recorded(speculative, (
        "target", "propose", "tokens", "max_new", "gamma", "warp", "choose", "verify", "eos")))
    return calls


def says_of_both_sides(name, value):
    """Does the warp of the target, and of the draft where there is one, have this setting?"""
    def holds(call):
        warps = [call.warp, *([call.propose.warp] if call.way is speculative else [])]
        return all(one.keywords[name] == value for one in warps)

    return holds


def dtype_is(dtype):
    def holds(call):
        models = [call.target, *([call.propose.model] if call.way is speculative else [])]
        return all(model.embed.dtype == dtype for model in models)

    return holds


EVERYWHERE, WITH_DRAFTS = lambda call: True, lambda call: call.way is speculative
OPTIONS = {
    "": (WITH_DRAFTS, lambda call: call.gamma == MICRO.gamma and call.verify is verify_token),
    "--max-new 7": (EVERYWHERE, lambda call: call.max_new == 7),
    "--gamma 2": (WITH_DRAFTS, lambda call: call.gamma == 2),
    "--temperature 0.5": (EVERYWHERE, says_of_both_sides("temperature", 0.5)),
    "--top-k 5": (EVERYWHERE, says_of_both_sides("top_k", 5)),
    "--top-p 0.9": (EVERYWHERE, says_of_both_sides("top_p", 0.9)),
    "--seed 7": (EVERYWHERE, lambda call: call.seed == 7),
    "--drafter model": (WITH_DRAFTS, lambda call: isinstance(call.propose, DraftModel)),
    "--drafter lookup": (WITH_DRAFTS, lambda call: "prompt_lookup" in call.propose.__qualname__),
    "--verify token": (WITH_DRAFTS, lambda call: call.verify is verify_token),
    "--verify block": (WITH_DRAFTS, lambda call: call.verify is verify_block),
    "--dtype float32": (EVERYWHERE, dtype_is(torch.float32)),
    "--dtype float64": (EVERYWHERE, dtype_is(torch.float64)),
    "--dtype bfloat16": (EVERYWHERE, dtype_is(torch.bfloat16)),
    "--threads 1": (EVERYWHERE, lambda call: call.threads == 1),
    "--threads 3": (EVERYWHERE, lambda call: call.threads == 3),
    "--device cpu": (EVERYWHERE, lambda call: call.target.device.type == "cpu"),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_reaches_every_text_that_is_decoded(options, kept, started, capsys):
    """The text that is printed, then both ways of the comparison: once before the clock, and three
    times on it."""
    asked, (concerned, holds) = options.split(), OPTIONS[options]
    kept = kept[:2] if asked[:1] in (["--device"], ["--dtype"]) else kept
    new = [] if "--max-new" in asked else ["--max-new", 5]
    code, _, err = ended(specdec, ["def", *kept, *new, *asked], capsys)
    assert (code, err) == (0, "")
    assert [call.way for call in started] == [speculative] + [plain, speculative] * 4
    assert [call.eos is None for call in started] == [False] + [True] * 8
    assert len({tuple(call.tokens) for call in started}) == 1
    assert all(holds(call) for call in started if concerned(call))


def test_the_line_below_the_figures_says_what_ran(kept, capsys):
    cpu = [*kept[:2], "--device", "cpu", "--dtype", "float64", "--threads", 1]
    _, out, _ = ended(specdec, ["def", *cpu, "--max-new", 5, "--gamma", 2], capsys)
    assert "on cpu, target in float64, draft in float64, 1 threads" in out and "gamma 2" in out


def test_the_checkpoint_asked_for_is_the_one_that_is_used(tmp_path, started, capsys):
    pair = micro_pair()
    for gamma in (2, 5):
        other = replace(pair, gamma=gamma, prompts=[f"prompt {gamma} "], notes=[f"note {gamma}"])
        save_pair(other, tmp_path / str(gamma))
    for gamma in (5, 2):
        _, out, _ = ended(specdec, ["--checkpoint", tmp_path / str(gamma), "--max-new", 3], capsys)
        assert out.startswith(f"note: note {gamma}\nprompt {gamma} ")
        assert {call.gamma for call in started if call.way is speculative} == {gamma}
        started.clear()


def test_a_rule_and_drafter_of_ones_own_can_be_named(kept, started, monkeypatch, capsys):
    """By adding them to a table."""
    def never(p, q, drafted, choose):
        return Verdict(torch.zeros((), dtype=torch.long, device=p.device), choose(p[0]))

    def one_at_a_time(pair, warp):
        propose = DraftModel(pair.draft, warp)
        return lambda tokens, gamma, choose: propose(tokens, min(gamma, 1), choose)

    monkeypatch.setitem(VERIFY, "never", never)
    monkeypatch.setitem(DRAFTERS, "mine", one_at_a_time)
    arguments = ["def", *kept, "--max-new", 6, "--verify", "never", "--drafter", "mine"]
    code, out, err = ended(specdec, arguments, capsys)
    assert (code, err) == (0, "") and "correction 5, bonus 1" in out
    assert all(call.verify is never for call in started if call.way is speculative)


# ---------------------------------------------------------------- command line: the figures

def test_the_figures_in_the_file_are_those_on_the_screen(kept, tmp_path, capsys):
    path = tmp_path / "figures.json"
    _, out, _ = ended(specdec, ["def", *kept, "--max-new", "30", "--json", path], capsys)
    row = strict(path)
    assert row["new_tokens"] == row["plain_new_tokens"] == 30
    assert row["accepted"] <= row["tested"] <= row["drafted"]
    assert row["tokens_per_pass"] == row["new_tokens"] / row["passes"]
    assert row["alpha"] == row["accepted"] / row["tested"]
    assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
    assert min(row["plain_tokens_per_s"], row["speculative_tokens_per_s"]) > 0
    lines = {line.split()[0]: line.split()[1:] for line in out.split("\n") if line.strip()}
    assert lines["plain"] == [f"{row['plain_tokens_per_s']:.0f}", "30", "30", "1.00"]
    assert lines["speculative"] == [
        f"{row['speculative_tokens_per_s']:.0f}", "30", f"{row['passes']}",
        f"{row['tokens_per_pass']:.2f}", f"{row['accepted']}/{row['tested']}"]
    speedups = "speedup {speedup:.2f}x (3 runs: {speedup_min:.2f} to {speedup_max:.2f})"
    assert speedups.format(**row) in out


def test_the_rounds_in_the_file_are_those_of_the_text(kept, tmp_path, capsys):
    path, options = tmp_path / "figures.json", ["def", *kept, "--max-new", "30", "--seed", "3"]
    ended(specdec, [*options, "--json", path], capsys)
    pair, settings, tokens = prepared(options)
    assert strict(path)["rounds"] == [
        dict(drafts=one.drafts, accepted=one.accepted, new=one.new, writers=one.writers,
             cache=[one.cache_before, one.cache_fed, one.cache_kept])
        for one in decode_speculative(pair, tokens, settings, pair.encoding.eot_token)]


def test_a_round_in_the_file_has_the_drafts_that_joined_the_text(tmp_path):
    """The rule let three stand, and the second ended the text."""
    one = replace(a_round([7, 8, 9], 2, [7, 8]), verdict=Verdict(torch.tensor(3), torch.tensor(1)))
    program.write_json(tmp_path / "file", {"rounds": [one]})
    (found,) = strict(tmp_path / "file")["rounds"]
    assert (found["accepted"], found["new"], found["drafts"]) == (2, [7, 8], [7, 8, 9])
    assert found["writers"] == ["draft", "draft"]


def test_who_wrote_the_text_is_counted_below_it(kept, tmp_path, capsys):
    path = tmp_path / "figures.json"
    _, out, _ = ended(specdec, ["def", *kept, "--max-new", "30", "--json", path], capsys)
    writers = [writer for one in strict(path)["rounds"] for writer in one["writers"]]
    assert "written by: " + ", ".join(f"{writer} {writers.count(writer)}" for writer in (
        "draft", "correction", "bonus")) in out


def test_a_text_that_ends_early_is_said_to(kept, monkeypatch, capsys):
    pair = micro_pair()
    target = saying(7, pair.encoding.eot_token, vocab=pair.encoding.n_vocab)
    target.config, target.embed = pair.target.config, pair.target.embed
    monkeypatch.setattr(program, "load_pair", lambda *_: replace(pair, target=target))
    code, out, err = ended(specdec, [chr(1), *kept, "--max-new", 9], capsys)
    assert (code, err) == (0, "")
    assert "the text ended after 2 tokens; both ways were timed past that" in out
    _, out, _ = ended(specdec, [chr(1), *kept, "--max-new", 2], capsys)
    assert "the text ended" not in out  # as many tokens as were asked for


# ---------------------------------------------------------------- terminal, pipe, file

def test_colours_are_for_terminals_and_not_with_no_color(kept, monkeypatch, capsys):
    def run():
        return written(ended(specdec, ["def", *kept, "--max-new", "12"], capsys)[1])

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    piped = run()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    coloured = run()
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE in coloured and ESCAPE not in piped
    assert re.sub(ESCAPE + r"\[\d+m", "", coloured) == piped == run()


@pytest.mark.parametrize("encoding", ("ascii", "cp1252"))
def test_a_pipe_of_few_characters_does_not_stop_the_program(encoding, kept, monkeypatch):
    """The pipes of Windows: the text may hold any character, and U+FFFD for bytes that are none."""
    pipe = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", pipe)
    specdec.main(["é🙂日本", *map(str, kept), "--max-new", "2"])
    pipe.flush()
    assert b"accepted/tested" in pipe.buffer.getvalue()


def test_a_process_in_a_pipe_prints_plain_text(kept):
    command = [sys.executable, specdec.__file__, "def é🙂", *kept, "--max-new", "9"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("def é🙂") and "accepted/tested" in done.stdout
    assert ESCAPE not in done.stdout and "\r" not in done.stdout


def test_an_interrupted_decoding_ends_without_a_traceback(kept, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(GPT, "forward", interrupt)
    code, out, err = ended(specdec, ["def", *kept], capsys)
    assert code == 130 and "interrupted" in out and err == ""


# ---------------------------------------------------------------- a fresh clone, and no network

def test_a_fresh_clone_trains_a_pair_once_and_keeps_it(tmp_path, micro_preset, monkeypatch, capsys):
    (tmp_path / "checkpoints" / "tiny").mkdir(parents=True)  # a first training was interrupted
    monkeypatch.setattr(program, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(train_tiny, "standard_library", lambda: [Path(textwrap.__file__)])
    arguments = ["def", "--max-new", "4", "--device", DEVICE.type, "--dtype", "float32"]
    first, second = (ended(specdec, arguments, capsys) for _ in range(2))
    assert first[0] == second[0] == 0
    assert "no trained pair yet" in first[1]
    assert pair_path(tmp_path / "checkpoints" / "tiny").exists()
    assert second[1].startswith("def")


def test_training_and_decoding_need_no_network(tmp_path, monkeypatch, capsys):
    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, forbidden)
    save_pair(quiet_pair(MICRO, [SOURCE]), tmp_path)
    arguments = ["def", "--max-new", "5", "--checkpoint", tmp_path, "--device", DEVICE.type]
    code, out, err = ended(specdec, arguments, capsys)
    assert (code, err) == (0, "") and out.startswith("def")
