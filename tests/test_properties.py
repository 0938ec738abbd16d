"""Properties: what must hold for every distribution, every row of logits, every text. Hypothesis looks for a
counterexample; numpy, which the program itself does not use for probability, is the independent oracle."""

import functools
import re
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from exact import every_outcome, law
from model import KVCache, linear
from rigs import DEVICE, random_gpt, rules
from sampling import expected_passes, expected_speedup, expected_tokens, residual, verify_block, verify_token, warp
from specdec import continuation, prompt_lookup
from train_tiny import END_OF_TEXT, PIECES, encode, train_tokenizer

dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("float32", "float64"))
EXACT = 1e-12  # float64: sums of a few hundred products
ROUNDED = 1e-5  # float32: the same with steps of 6e-8


# ---------------------------------------------------------------- tables of p and q

SINGLE = st.tuples(st.integers(1, 9), st.just(1))  # (V, γ)
SHORT = st.sampled_from([(2, 2), (3, 2), (4, 2), (2, 3)])  # few outcomes, and V = 2 alone would not do


def rows(vocab):
    """One distribution. Half of them have no zeros; in the others zeros, ties and very small numbers are common."""
    weights = st.one_of(st.integers(1, 20), st.sampled_from([0, 0, 1, 1, 2, 7, 1e-3, 1e-12, 1e-300]))
    weights = st.one_of(*[st.lists(one, min_size=vocab, max_size=vocab) for one in (st.integers(1, 20), weights)])
    return weights.filter(any).map(lambda w: np.array(w) / sum(w))


def neighbours(p):
    """Rows that differ from p by one step of rounding at most."""
    towards = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=len(p), max_size=len(p))
    return towards.map(lambda ends: np.array([x if end is None or x == 0 else np.nextafter(x, end, dtype=x.dtype)
                                              for x, end in zip(p, ends)]))


@st.composite
def tables(draw, shapes, dtype=np.float64):
    """(p, q) of a round, (γ+1, V) and (γ, V): rows of q are anything, p itself, or p up to one rounding step."""
    vocab, gamma = draw(shapes)
    p = [draw(rows(vocab)).astype(dtype) for _ in range(gamma + 1)]
    q = [draw(st.one_of(rows(vocab), rows(vocab), st.just(row), neighbours(row))).astype(dtype) for row in p[:gamma]]
    return torch.from_numpy(np.stack(p)).to(DEVICE), torch.from_numpy(np.stack(q)).to(DEVICE)


def one_round(verify, p, q):
    """A program that drafts from q, verifies, and returns the tokens that the round gives."""
    def program(choose):
        drafted = choose(q)
        n, token = verify(p, q, drafted, choose)
        return (*drafted[:n].tolist(), token.item())

    return program


def accepted(round_law):
    """The mean number of accepted drafts: a round gives one token more."""
    return sum(weight * (len(text) - 1) for text, weight in round_law.items())


def product(p_rows):
    """The law of independent tokens, one a row: an array with one axis a token."""
    return functools.reduce(np.multiply.outer, p_rows, np.array(1.0))


def completed(round_law, p):
    """The law of the first γ+1 tokens, where the target by itself writes what the round has not: (V, ..., V)."""
    p = p.cpu().numpy()
    total = np.zeros((p.shape[1],) * len(p))
    for text, weight in round_law.items():
        total[text] += weight * product(p[len(text):])
    return total


# ---------------------------------------------------------------- one round

@rules
@given(st.one_of(tables(SINGLE), tables(SHORT)))
def test_the_tokens_of_a_whole_round_follow_p_jointly_whatever_q_is(verify, table):
    p, q = table
    total = completed(law(one_round(verify, p, q)), p)
    assert np.abs(total - product(p.cpu().numpy())).max() < EXACT


@rules
@given(tables(SHORT, dtype=np.float32))
def test_a_round_follows_p_in_float32_also_where_q_is_p_up_to_rounding(verify, table):
    p, q = table
    weights = defaultdict(float)
    for weight, text in every_outcome(one_round(verify, p, q)):
        weights[text] += weight
    assert np.abs(completed(weights, p) - product(p.cpu().numpy())).max() < ROUNDED


@rules
@given(tables(SINGLE))
def test_a_draft_is_accepted_with_the_overlap_of_p_and_q(verify, table):
    p, q = table
    overlap = torch.minimum(p[0], q[0]).sum().item()
    assert abs(accepted(law(one_round(verify, p, q))) - overlap) < EXACT


@given(tables(SHORT))
def test_the_block_rule_accepts_no_fewer_drafts_than_the_token_rule(table):
    token, block = (accepted(law(one_round(verify, *table))) for verify in (verify_token, verify_block))
    overlaps = torch.minimum(table[0][:-1], table[1]).sum(-1).cumprod(0)  # P(at least i stand), by the token rule
    assert abs(token - overlaps.sum().item()) < EXACT
    assert block > token - EXACT


@dtypes
@given(st.data())
def test_the_residual_is_a_distribution_that_never_supports_what_p_forbids(dtype, data):
    p, q = data.draw(tables(SINGLE, dtype=str(dtype).removeprefix("torch.")))
    p, q = p[0], q[0]
    r = residual(p, q)
    assert r.isfinite().all() and (r >= 0).all() and abs(r.sum().item() - 1) < ROUNDED
    assert (r[p == 0] == 0).all()
    left = np.maximum(p.cpu().numpy() - q.cpu().numpy(), 0)
    np.testing.assert_allclose(r.cpu(), left / left.sum() if left.any() else p.cpu() / p.sum().cpu(), rtol=1e-5)


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=8), st.floats(-50, 50, width=32))
def test_a_constant_added_to_the_logits_of_the_draft_forces_no_nan_and_no_forbidden_token(z, constant):
    z = torch.tensor(z, device=DEVICE)
    p, q = z.softmax(-1), (z + constant).softmax(-1)  # equal up to rounding
    total = sum(weight for weight, _ in every_outcome(one_round(verify_token, torch.stack([p, p]), q[None])))
    assert abs(total - 1) < ROUNDED


# ---------------------------------------------------------------- the block rule against its formulas

def reference_block(p, q, drafted):
    """(coins, keep): h_1 ... h_γ and keep_0 ... keep_γ of Sun et al. 2024, one scalar at a time."""
    gamma, keep, coins = len(q), [1.0], []
    for i in range(gamma):
        keep.append(min(1.0, keep[i] * (p[i, drafted[i]] / q[i, drafted[i]])))
    for i in range(1, gamma):
        Z = np.maximum(keep[i] * p[i] - q[i], 0).sum()
        coins.append(Z / (Z + (1 - keep[i])) if Z > 0 else 0.0)
    return np.array([*coins, keep[gamma]]), keep


@given(tables(st.tuples(st.integers(2, 6), st.integers(1, 6))), st.data())
def test_the_block_rule_tosses_the_coins_of_the_paper_and_takes_the_last_that_comes_up(table, data):
    p, q = (t.cpu().numpy() for t in table)
    gamma, vocab = q.shape
    drafted = [data.draw(st.sampled_from([x for x in range(vocab) if row[x] > 1e-20])) for row in q]
    coins, keep = reference_block(p, q, drafted)
    tossed = [data.draw(st.sampled_from([c for c, possible in enumerate((h < 1, h > 0)) if possible])) for h in coins]
    n = max((i + 1 for i, coin in enumerate(tossed) if coin), default=0)
    left = p[n] if n == gamma else np.maximum(keep[n] * p[n] - q[n], 0)
    asked = []

    def choose(probs):
        asked.append(probs.cpu().numpy())
        return probs.argmax(-1) if len(asked) == 2 else torch.tensor(tossed, device=DEVICE)

    count, _ = verify_block(*table, torch.tensor(drafted, device=DEVICE), choose)
    assert count == n
    np.testing.assert_allclose(asked[0], np.stack([1 - coins, coins], -1), atol=1e-14)
    if left.sum() > 1e-9:  # below that, rounding decides what is left
        np.testing.assert_allclose(asked[1].ravel(), left / left.sum(), atol=1e-6)


@rules
def test_a_draft_of_vanishing_q_makes_no_nan(verify):
    """q(x) = 5e-324 overflows p(x)/q(x), and the draft before it has no chance: 0 · inf."""
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64, device=DEVICE)
    q = torch.tensor([[1.0, 0.0], [5e-324, 1.0]], dtype=torch.float64, device=DEVICE)
    total = completed(law(one_round(verify, p, q)), p)
    assert np.abs(total - product(p.cpu().numpy())).max() < EXACT


# ---------------------------------------------------------------- warp

GRID = st.integers(-160, 160).map(lambda i: i / 8)  # ties are common, near-ties impossible
LOGITS = st.lists(GRID, min_size=1, max_size=12)
SETTINGS = dict(temperature=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 4.0]),
                top_k=st.one_of(st.none(), st.integers(1, 14)),
                top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)))


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def reference_warp(z, temperature, top_k, top_p):
    """(probabilities, cumulative sums in rank order), by the book."""
    z = np.array(z)
    order = np.argsort(-z, kind="stable")  # equal logits in the order of their ids
    if temperature == 0:
        return np.eye(len(z))[order[0]], np.ones(1)
    kept = order[:top_k]
    probs = softmax(z[kept] / temperature)
    cumulative = probs.cumsum()
    size = len(kept) if top_p == 1 else 1 + np.searchsorted(cumulative, top_p)  # the fewest that reach P
    result = np.zeros(len(z))
    result[kept[:size]] = probs[:size] / probs[:size].sum()
    return result, cumulative


@given(LOGITS, st.fixed_dictionaries(SETTINGS))
def test_warp_is_temperature_then_top_k_then_top_p(z, setting):
    probs, cumulative = reference_warp(z, **setting)
    assume(np.abs(cumulative - setting["top_p"]).min() > 1e-9 or setting["top_p"] == 1)  # the edge itself: test_cases
    np.testing.assert_allclose(warp(tensor(z), **setting).cpu(), probs, rtol=1e-9, atol=1e-15)


@dtypes
@given(z=LOGITS, setting=st.fixed_dictionaries(SETTINGS))
def test_warp_gives_a_distribution_that_keeps_the_order_of_the_logits(dtype, z, setting):
    probs = warp(tensor(z, dtype), **setting)
    assert probs.dtype == dtype and (probs >= 0).all() and abs(probs.sum().item() - 1) < ROUNDED
    ranked = probs[tensor(z).argsort(dim=-1, descending=True, stable=True)]
    assert (ranked.diff() <= 0).all()


@given(LOGITS, st.integers(1, 14))
def test_top_k_keeps_exactly_k_and_filtering_again_keeps_the_same(z, k):
    once = warp(tensor(z), top_k=k)
    again = warp(once.log(), top_k=k)
    assert (once > 0).sum() == min(k, len(z))
    assert ((again > 0) == (once > 0)).all()


@given(LOGITS, st.floats(1e-6, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_p(z, top_p):
    full, kept = warp(tensor(z)), warp(tensor(z), top_p=top_p) > 0
    assert full[kept].sum() > top_p - EXACT
    assert full[kept].sum() - full[kept].min() < top_p + EXACT  # one fewer would not reach it
    assert kept.all() or full[kept].min() >= full[~kept].max()


@given(LOGITS, st.fixed_dictionaries(SETTINGS), st.integers(-8000, 8000))
def test_warp_does_not_see_a_constant_added_to_all_logits(z, setting, eighths):
    moved = warp(tensor(z) + eighths / 8, **setting)  # the sums are exact in float64
    np.testing.assert_allclose(moved.cpu(), warp(tensor(z), **setting).cpu(), atol=1e-12)


@given(LOGITS, st.one_of(st.none(), st.integers(1, 14)), st.floats(0.01, 1.0))
def test_temperature_zero_is_the_argmax_under_every_filter(z, top_k, top_p):
    probs = warp(tensor(z), 0, top_k, top_p)
    assert probs.tolist() == [float(i == int(np.argmax(z))) for i in range(len(z))]


FINITE = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1, width=32), GRID.map(lambda z: z * 1e-38))
TEMPERATURES = st.one_of(st.sampled_from([0.0, 5e-324, 1e-40, 1e39, 1e308]), st.floats(0, allow_infinity=False))


@dtypes
@given(st.lists(FINITE, min_size=1, max_size=6), st.fixed_dictionaries(SETTINGS | {"temperature": TEMPERATURES}))
def test_warp_is_never_nan_for_finite_logits_of_any_size_at_any_temperature(dtype, parts, setting):
    probs = warp(tensor(parts, dtype) * torch.finfo(dtype).max, **setting)
    assert probs.isfinite().all() and abs(probs.sum().item() - 1) < ROUNDED


@given(st.lists(st.lists(GRID, min_size=3, max_size=3), min_size=1, max_size=5), st.fixed_dictionaries(SETTINGS))
def test_warp_treats_each_row_by_itself_and_writes_to_none(many, setting):
    z = tensor(many)
    together = warp(z, **setting)
    assert z.tolist() == many
    np.testing.assert_allclose(together.cpu(), torch.stack([warp(row, **setting) for row in z]).cpu(), atol=1e-15)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@given(z=LOGITS, setting=st.fixed_dictionaries(SETTINGS))
def test_probabilities_are_float32_where_the_logits_are_narrower(dtype, z, setting):
    narrow = tensor(z, dtype)
    assert warp(narrow, **setting).dtype == torch.float32
    assert torch.equal(warp(narrow, **setting), warp(narrow.float(), **setting))


# ---------------------------------------------------------------- theory

@given(st.integers(0, 1000), st.integers(1, 50))
def test_expected_tokens_is_the_sum_of_the_chances_that_each_draft_stands(thousandths, gamma):
    alpha = thousandths / 1000
    assert expected_tokens(alpha, gamma) == pytest.approx(np.power(alpha, np.arange(gamma + 1)).sum(), rel=1e-9)


@given(st.integers(0, 900), st.integers(1, 8))
def test_equation_1_is_the_rate_of_a_long_text_whose_tokens_are_all_as_hard(thousandths, gamma):
    alpha, n = thousandths / 1000, 60 * (gamma + 1)
    passes, twice = (expected_passes([[alpha] * gamma] * length) for length in (n, 2 * n))
    assert n / (twice - passes) == pytest.approx(expected_tokens(alpha, gamma), rel=1e-6)


@pytest.mark.parametrize("alpha, c, gamma, speedup", [
    (0.8, 0.02, 11, 3.82), (0.8, 0.1, 6, 2.47), (0.9, 0.02, 19, 6.37), (0.9, 0.1, 10, 3.43), (0.6, 0.1, 3, 1.67)])
def test_the_best_gamma_and_its_speedup_are_those_of_the_formula(alpha, c, gamma, speedup):
    speedups = [expected_speedup(alpha, g, c, 1) for g in range(1, 41)]
    assert 1 + int(np.argmax(speedups)) == gamma
    assert round(max(speedups), 2) == speedup


# ---------------------------------------------------------------- the cache

MODEL = random_gpt(vocab_size=5, n_layer=2, context=20)


class FeedAndRollBack(RuleBasedStateMachine):
    """Any order of feeding and rolling back: what the cache gives is what a fresh forward over the text gives."""

    def __init__(self):
        super().__init__()
        self.cache, self.text = KVCache(MODEL), []

    @rule(new=st.lists(st.integers(0, 4), min_size=1, max_size=7), rows=st.one_of(st.none(), st.integers(1, 7)))
    def feed(self, new, rows):
        ids = torch.tensor([new], device=DEVICE)
        with torch.inference_mode():
            if len(self.text) + len(new) > MODEL.config.context:
                with pytest.raises(ValueError, match="do not fit"):
                    MODEL(ids, self.cache, rows)
            else:
                self.text += new
                fresh = MODEL(torch.tensor([self.text], device=DEVICE))[0, -min(rows or 7, len(new)):]
                assert (MODEL(ids, self.cache, rows)[0] - fresh).abs().max() < 1e-10
        assert self.cache.length == len(self.text)

    @rule(part=st.floats(0, 1))
    def roll_back(self, part):
        self.cache.length = int(part * len(self.text))
        del self.text[self.cache.length:]


TestTheCacheEqualsAFreshForward = FeedAndRollBack.TestCase
TestTheCacheEqualsAFreshForward.settings = settings(stateful_step_count=20)


WIDTHS = st.sampled_from([1, 6, 300])


@dtypes
@given(st.integers(1, 3), st.integers(1, 12), WIDTHS, WIDTHS, st.integers(0, 99))
def test_every_road_of_a_matrix_product_leads_to_the_same_place(dtype, batch, rows, wide, high, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, rows, wide, generator=generator, dtype=dtype).to(DEVICE)
    weight = torch.randn(high, wide, generator=generator, dtype=dtype).to(DEVICE)
    with torch.no_grad():
        assert torch.allclose(linear(x, weight), F.linear(x, weight), atol=1e-4)  # sums of 300 products in float32


# ---------------------------------------------------------------- the tokenizer

# Text that looks special, line ends, and scripts that the training text does not hold.
SNIPPETS = [END_OF_TEXT, "<|", "endoftext", "|>", "<|fim_prefix|>", "\r\n", "\n    ", "  ", "\t", "\0", "__x__",
            "\u2028", "\x1c", "é", "e\u0301", "²", "٣", "日本語", "русский", "عربى", "हिन्दी", "🙂", "👩‍👩‍👧"]
TEXTS = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=8)), max_size=8).map("".join)


@functools.cache
def english():
    """A vocabulary of some 400 tokens from one English module of the standard library."""
    return train_tokenizer([Path(textwrap.__file__).read_text(encoding="utf-8")], 400)


@given(TEXTS)
def test_any_text_comes_back_from_its_tokens(text):
    encoding = english()
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids) == text
    assert "".join(re.findall(PIECES, text)) == text


@given(TEXTS)
def test_no_text_becomes_the_end_of_text_token(text):
    encoding = english()
    ids = encode([text, text], encoding).tolist()
    ordinary = encoding.encode_ordinary(text)
    assert encoding.eot_token not in ordinary
    assert ids == [*ordinary, encoding.eot_token] * 2


@given(st.lists(TEXTS, max_size=3).filter(any), TEXTS, st.integers(257, 300))
def test_a_vocabulary_trained_on_any_text_holds_any_other(documents, text, size):
    encoding = train_tokenizer(documents, size)
    assert 257 <= encoding.n_vocab <= size and encoding.eot_token == encoding.n_vocab - 1
    assert encoding.decode(encoding.encode_ordinary(text)) == text
    assert encoding.name == train_tokenizer(documents, size).name  # the same text, the same vocabulary


@given(st.lists(TEXTS, max_size=3).filter(any))
def test_a_larger_vocabulary_needs_no_more_tokens_for_the_text_it_was_trained_on(documents):
    lengths = [len(encode(documents, train_tokenizer(documents, size))) for size in (257, 270, 300)]
    assert lengths == sorted(lengths, reverse=True)


# ---------------------------------------------------------------- prompt lookup

def naive_continuation(tokens):
    """Try every suffix, the longest first, at every earlier place, the latest first."""
    for n in range(len(tokens) - 1, 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start:start + n] == tokens[-n:]:
                return tokens[start + n:]
    return []


@given(st.lists(st.integers(0, 3), max_size=30))
def test_lookup_continues_the_latest_occurrence_of_the_longest_known_suffix(tokens):
    before = list(tokens)
    assert continuation(tokens) == naive_continuation(tokens)
    assert tokens == before


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 5))
def test_the_q_of_lookup_is_certain_of_each_token_that_it_drafts(tokens, gamma):
    drafted, q = prompt_lookup(4, DEVICE)(tokens, gamma, None)
    assert drafted.tolist() == naive_continuation(tokens)[:gamma]
    assert torch.equal(q, F.one_hot(drafted, 4).float())
