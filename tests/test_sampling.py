"""sampling.py: what must hold for every distribution and every row of logits.

Small cases are enumerated, the rest is drawn by Hypothesis, which looks for a counterexample.
numpy, which the program itself does not use for probability, is the independent oracle.
"""

import functools
import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from exact import EXACT, distance, every_outcome, law
from rigs import DEVICE, accepted, greedy, one_round, rules, seeded, times
from sampling import (Verdict, check_seed, residual, residual_after, verify_block, verify_token,
                      warp)

dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
ROUNDED = 1e-5  # float32: sums of a few hundred products with steps of 6e-8


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# ---------------------------------------------------------------- tables of p and q

SINGLE = st.tuples(st.integers(1, 9), st.just(1))  # (V, γ)
SHORT = st.sampled_from([(2, 2), (3, 2), (4, 2), (2, 3)])  # few outcomes; V = 2 alone hides faults


def distributions(vocab):
    """One distribution. Half of them have no zeros; in the others zeros, ties and very small
    numbers are common."""
    odd = st.sampled_from([0, 0, 1, 1, 2, 7, 1e-3, 1e-12, 1e-300])
    lists = [st.lists(weight, min_size=vocab, max_size=vocab)
             for weight in (st.integers(1, 20), st.one_of(st.integers(1, 20), odd))]
    return st.one_of(lists).filter(any).map(lambda w: np.array(w) / sum(w))


def neighbours(p):
    """Rows that differ from p by one step of rounding at most."""
    def moved(ends):
        return np.array([x if end is None or x == 0 else np.nextafter(x, end, dtype=x.dtype)
                         for x, end in zip(p, ends)])

    return st.lists(st.sampled_from([0.0, 1.0, None]), min_size=len(p), max_size=len(p)).map(moved)


@st.composite
def drawn_tables(draw, shapes, dtype=np.float64):
    """(p, q) of a round, (γ+1, V) and (γ, V): rows of q are anything, p itself, or p up to one
    rounding step."""
    vocab, gamma = draw(shapes)
    p = [draw(distributions(vocab)).astype(dtype) for _ in range(gamma + 1)]
    q = [draw(st.one_of(distributions(vocab), distributions(vocab), st.just(one), neighbours(one)))
         .astype(dtype) for one in p[:gamma]]
    return torch.from_numpy(np.stack(p)).to(DEVICE), torch.from_numpy(np.stack(q)).to(DEVICE)


def product(p_rows):
    """The law of independent tokens, one a row: an array with one axis a token."""
    return functools.reduce(np.multiply.outer, p_rows, np.array(1.0))


def completed(round_law, p):
    """The law of the first γ+1 tokens, where the target by itself writes what the round has not:
    (V, ..., V)."""
    p = p.cpu().numpy()
    total = np.zeros((p.shape[1],) * len(p))
    for (drafts, n, token), weight in round_law.items():
        new = (*drafts[:n], token)
        total[new] += weight * product(p[len(new):])
    return total


# ---------------------------------------------------------------- one round

@rules
def test_a_round_follows_p_over_a_grid_of_all_tables(verify):
    """V = 2, γ = 2, and each probability 0, 1/3 or 1: every edge in every combination."""
    for first in itertools.product((0, 1 / 3, 1), repeat=5):
        rows = tensor([[x, 1 - x] for x in first])
        p, q = rows[:3], rows[3:]
        total = completed(law(one_round(verify, p, q)), p)
        assert np.abs(total - product(p.cpu().numpy())).max() < EXACT, first


@rules
@given(st.one_of(drawn_tables(SINGLE), drawn_tables(SHORT)))
def test_a_whole_round_follows_p_jointly_whatever_q_is(verify, table):
    p, q = table
    total = completed(law(one_round(verify, p, q)), p)
    assert np.abs(total - product(p.cpu().numpy())).max() < EXACT


@rules
@given(drawn_tables(SHORT, dtype=np.float32))
def test_a_round_follows_p_in_float32_up_to_rounding(verify, table):
    """Also where q is p up to rounding."""
    p, q = table
    weights = defaultdict(float)
    for weight, result in every_outcome(one_round(verify, p, q)):
        weights[result] += weight
    assert np.abs(completed(weights, p) - product(p.cpu().numpy())).max() < ROUNDED


@rules
@given(drawn_tables(SINGLE))
def test_a_draft_is_accepted_with_probability_of_the_overlap(verify, table):
    p, q = table
    overlap = torch.minimum(p[0], q[0]).sum().item()
    assert abs(accepted(law(one_round(verify, p, q))) - overlap) < EXACT


@given(drawn_tables(SHORT))
def test_the_block_rule_accepts_no_fewer_drafts(table):
    """Than the token rule, of which P(at least i stand) is the product of i overlaps."""
    p, q = table
    token = accepted(law(one_round(verify_token, p, q)))
    block = accepted(law(one_round(verify_block, p, q)))
    overlaps = torch.minimum(p[:-1], q).sum(-1).cumprod(0)
    assert abs(token - overlaps.sum().item()) < EXACT
    assert block > token - EXACT


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=8), st.floats(-50, 50, width=32))
def test_a_constant_added_to_the_drafts_logits_forces_no_nan(z, constant):
    """p and q are equal up to rounding then; a token that p forbids does not come either."""
    z = tensor(z, torch.float32)
    p, q = z.softmax(-1), (z + constant).softmax(-1)
    outcomes = every_outcome(one_round(verify_token, torch.stack([p, p]), q[None]))
    assert abs(sum(weight for weight, _ in outcomes) - 1) < ROUNDED


@rules
def test_a_draft_of_vanishing_q_makes_no_nan(verify):
    """q(x) = 5e-324 overflows p(x)/q(x), and the draft before it has no chance: 0 · inf."""
    p = tensor([[0, 1], [1, 0], [0.5, 0.5]])
    q = tensor([[1, 0], [5e-324, 1]])
    total = completed(law(one_round(verify, p, q)), p)
    assert np.abs(total - product(p.cpu().numpy())).max() < EXACT


@rules
def test_a_round_without_drafts_draws_from_p(verify):
    p = tensor([[0.6, 0.3, 0.1]])
    expected = {((), 0, x): p[0, x].item() for x in range(3)}
    assert distance(law(one_round(verify, p, p[:0])), expected) < EXACT


# ---------------------------------------------------------------- the residual

@dtypes
@times(2)
@given(data=st.data())
def test_the_residual_is_a_distribution_within_p(dtype, data):
    """It never supports what p forbids, and is norm(max(0, p - q)) or, where that is nothing, p."""
    p, q = data.draw(drawn_tables(SINGLE, dtype=str(dtype).removeprefix("torch.")))
    p, q = p[0], q[0]
    r = residual(p, q)
    assert r.isfinite().all() and (r >= 0).all() and abs(r.sum().item() - 1) < ROUNDED
    assert (r[p == 0] == 0).all()
    left = np.maximum(p.cpu().numpy() - q.cpu().numpy(), 0)
    expected = left / left.sum() if left.any() else p.cpu() / p.sum().cpu()
    np.testing.assert_allclose(r.cpu(), expected, rtol=1e-5)


@dtypes
def test_the_residual_is_what_q_leaves_of_p(dtype):
    """And p itself where that is nothing."""
    p, q, certain = tensor([[0.6, 0.3, 0.1], [0.3, 0.5, 0.2], [1, 0, 0]], dtype)
    assert residual(p, q).tolist() == [1, 0, 0]
    assert residual(certain, certain).tolist() == [1, 0, 0]
    assert torch.allclose(residual(p, p), p)
    assert torch.allclose(residual(p, p * 0), p)  # the bonus


def test_after_the_last_draft_all_of_p_is_left():
    p, q = tensor([[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]]), tensor([[0.75, 0.25], [0.25, 0.75]])
    left = [residual_after(torch.tensor(n, device=DEVICE), p, q).tolist() for n in range(3)]
    assert left == [[0, 1], [1, 0], [0.25, 0.75]]


@rules
def test_a_forced_rejection_where_p_is_q_draws_from_p(verify):
    p = torch.tensor([[1.0, 0, 0], [0, 0, 1.0]], device=DEVICE)

    def choose(probs):
        if probs.dim() == 1:
            return probs.argmax(-1)
        return torch.zeros(len(probs), dtype=torch.long, device=DEVICE)  # no coin comes up

    verdict = verify(p, p[:1], torch.tensor([0], device=DEVICE), choose)
    assert (verdict.n.item(), verdict.token.item()) == (0, 0)


# ---------------------------------------------------------------- what a rule says of itself

def tossing(coins, seen):
    """A `choose` that gives these coins, then the likeliest token, and keeps what it was asked."""
    def choose(probs):
        seen.append(probs)
        return torch.tensor(coins, device=DEVICE) if len(seen) == 1 else probs.argmax(-1)

    return choose


def test_coins_after_the_first_rejection_do_not_count():
    p, q = (torch.full((n, 3), 1 / 3, device=DEVICE) for n in (5, 4))
    drafted = torch.tensor([0, 1, 2, 0], device=DEVICE)
    assert verify_token(p, q, drafted, tossing([1, 0, 1, 1], [])).n == 1


def test_the_token_rule_says_its_chances_coins_and_residual():
    p = tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.1, 0.8]])
    q = tensor([[0.3, 0.5, 0.2], [0.5, 0.4, 0.1]])
    seen = []
    verdict = verify_token(p, q, torch.tensor([1, 0], device=DEVICE), tossing([1, 0], seen))
    assert verdict.one_by_one and verdict.n == 1 and verdict.token == 2
    assert list(verdict.columns) == ["chance", "coin"]
    assert verdict.columns["chance"].tolist() == pytest.approx([0.6, 0.4])
    assert verdict.columns["coin"].tolist() == [1, 0]
    assert torch.allclose(seen[0], tensor([[0.4, 0.6], [0.6, 0.4]]))  # coin 1 with the chance
    assert verdict.drawn_from.tolist() == seen[1].tolist() == [0, 0, 1]


def test_the_block_rule_says_its_keep_h_coins_and_residual():
    """keep_1 = .3/.5; keep_1 p_2 - q_2 = [.2, .06, 0], so h_1 = .26 / (.26 + .4)."""
    p = tensor([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [1, 0, 0]])
    q = tensor([[0.3, 0.5, 0.2], [0.1, 0.12, 0.78]])
    seen = []
    verdict = verify_block(p, q, torch.tensor([1, 2], device=DEVICE), tossing([1, 1, 0], seen))
    keep = [0.6, 0.6 * 0.2 / 0.78]
    assert not verdict.one_by_one and verdict.n == 1 and verdict.token == 0
    assert list(verdict.columns) == ["keep", "chance", "coin"]
    assert verdict.columns["keep"].tolist() == pytest.approx(keep)
    assert verdict.columns["chance"].tolist() == pytest.approx([0.26 / 0.66, keep[1]])
    assert verdict.columns["coin"].tolist() == [1, 0]
    left = [0.2 / 0.26, 0.06 / 0.26, 0]
    assert verdict.drawn_from.tolist() == seen[1].tolist() == pytest.approx(left)


def test_a_verdict_needs_a_number_and_a_token_alone():
    verdict = Verdict(torch.tensor(0), torch.tensor(1))
    assert (verdict.drawn_from, verdict.columns, verdict.one_by_one) == (None, {}, False)


# ---------------------------------------------------------------- the block rule by its formulas

def reference_block(p, q, drafted):
    """(coins, keep): h_1 ... h_γ and keep_0 ... keep_γ of Sun et al. 2024, one scalar at a time."""
    gamma, keep, coins = len(q), [1.0], []
    for i in range(gamma):
        keep.append(min(1.0, keep[i] * (p[i, drafted[i]] / q[i, drafted[i]])))
    for i in range(1, gamma):
        Z = np.maximum(keep[i] * p[i] - q[i], 0).sum()
        coins.append(Z / (Z + (1 - keep[i])) if Z > 0 else 0.0)
    return np.array([*coins, keep[gamma]]), keep


@times(2)
@given(drawn_tables(st.tuples(st.integers(2, 6), st.integers(1, 6))), st.data())
def test_the_block_rule_tosses_the_coins_of_the_paper(table, data):
    """And takes the last that comes up, whatever coin 0 says."""
    p, q = (part.cpu().numpy() for part in table)
    gamma, vocab = q.shape
    drafted = [data.draw(st.sampled_from([x for x in range(vocab) if one[x] > 1e-20])) for one in q]
    coins, keep = reference_block(p, q, drafted)
    possible = [[coin for coin, can in enumerate((h < 1, h > 0)) if can] for h in coins]
    tossed = [data.draw(st.sampled_from(faces)) for faces in possible]
    n = max((i + 1 for i, coin in enumerate(tossed) if coin), default=0)
    left = p[n] if n == gamma else np.maximum(keep[n] * p[n] - q[n], 0)
    seen = []
    choose = tossing([data.draw(st.integers(0, 1)), *tossed], seen)

    verdict = verify_block(*table, torch.tensor(drafted, device=DEVICE), choose)
    assert verdict.n == n
    expected = np.stack([1 - coins, coins], -1)
    np.testing.assert_allclose(seen[0][1:].cpu(), expected, atol=1e-14)  # coin 0 decides nothing
    if left.sum() > 1e-9:  # below that, rounding decides what is left
        np.testing.assert_allclose(seen[1].ravel().cpu(), left / left.sum(), atol=1e-6)


# ---------------------------------------------------------------- warp by the book

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
    # The fewest that reach P.
    size = len(kept) if top_p == 1 else 1 + np.searchsorted(cumulative, top_p)
    result = np.zeros(len(z))
    result[kept[:size]] = probs[:size] / probs[:size].sum()
    return result, cumulative


TOP_KS, TOP_PS = (None, 1, 2, 3, 4, 9), (0.1, 0.3, 0.45, 0.8, 0.95, 1)


@pytest.mark.parametrize("temperature", (0, 0.25, 0.5, 1, 1.5, 4))
def test_every_combination_of_settings_is_by_the_book(temperature):
    """Over rows of four logits with ties in all places; an edge of top-p that rounding would decide
    is left to the cases below."""
    rows = [list(z) for z in itertools.product((-1.0, 0.0, 2.0), repeat=4)]
    for top_k, top_p in itertools.product(TOP_KS, TOP_PS):
        probs = warp(tensor(rows), temperature, top_k, top_p).cpu()
        for z, found in zip(rows, probs):
            expected, cumulative = reference_warp(z, temperature, top_k, top_p)
            if top_p == 1 or np.abs(cumulative - top_p).min() > 1e-9:
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)


# ---------------------------------------------------------------- warp for all logits

GRID = st.integers(-160, 160).map(lambda i: i / 8)  # ties are common, near-ties impossible
LOGITS = st.lists(GRID, min_size=1, max_size=12)
SETTINGS = dict(temperature=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 4.0]),
                top_k=st.one_of(st.none(), st.integers(1, 14)),
                top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)))


@times(2)
@given(LOGITS, st.fixed_dictionaries(SETTINGS))
def test_warp_is_temperature_then_top_k_then_top_p(z, setting):
    probs, cumulative = reference_warp(z, **setting)
    assume(np.abs(cumulative - setting["top_p"]).min() > 1e-9 or setting["top_p"] == 1)
    np.testing.assert_allclose(warp(tensor(z), **setting).cpu(), probs, rtol=1e-9, atol=1e-15)


@dtypes
@times(2)
@given(z=LOGITS, setting=st.fixed_dictionaries(SETTINGS))
@example(z=[0.0], setting=dict(temperature=0.5, top_k=1, top_p=0.5))
@example(z=[3.0, 3.0, 3.0], setting=dict(temperature=1.0, top_k=2, top_p=0.01))
def test_warp_gives_a_distribution_in_the_order_of_the_logits(dtype, z, setting):
    probs = warp(tensor(z, dtype), **setting)
    assert probs.dtype == dtype and (probs >= 0).all() and abs(probs.sum().item() - 1) < ROUNDED
    ranked = probs[tensor(z).argsort(dim=-1, descending=True, stable=True)]
    assert (ranked.diff() <= 0).all()


@times(2)
@given(LOGITS, st.integers(1, 14))
def test_top_k_keeps_exactly_k_and_filtering_again_the_same(z, k):
    once = warp(tensor(z), top_k=k)
    again = warp(once.log(), top_k=k)
    assert (once > 0).sum() == min(k, len(z))
    assert ((again > 0) == (once > 0)).all()


@times(2)
@given(LOGITS, st.floats(1e-6, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_p(z, top_p):
    full, kept = warp(tensor(z)), warp(tensor(z), top_p=top_p) > 0
    assert full[kept].sum() > top_p - EXACT
    assert full[kept].sum() - full[kept].min() < top_p + EXACT  # one fewer would not reach it
    assert kept.all() or full[kept].min() >= full[~kept].max()


@times(2)
@given(LOGITS, st.fixed_dictionaries(SETTINGS), st.integers(-8000, 8000))
def test_warp_does_not_see_a_constant_added_to_all_logits(z, setting, eighths):
    moved = warp(tensor(z) + eighths / 8, **setting)  # the sums are exact in float64
    np.testing.assert_allclose(moved.cpu(), warp(tensor(z), **setting).cpu(), atol=EXACT)


@times(2)
@given(LOGITS, st.one_of(st.none(), st.integers(1, 14)), st.floats(0.01, 1.0))
def test_temperature_zero_is_the_argmax_under_every_filter(z, top_k, top_p):
    probs = warp(tensor(z), 0, top_k, top_p)
    assert probs.tolist() == [float(i == int(np.argmax(z))) for i in range(len(z))]


FINITE = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1, width=32),
                   GRID.map(lambda z: z * 1e-38))
EXTREMES = st.one_of(st.sampled_from([0.0, 5e-324, 1e-40, 1e39, 1e308]),
                     st.floats(0, allow_infinity=False))


@dtypes
@times(2)
@given(parts=st.lists(FINITE, min_size=1, max_size=6),
       setting=st.fixed_dictionaries(SETTINGS | {"temperature": EXTREMES}))
@example(parts=[1.0, -1.0], setting=dict(temperature=5e-324, top_k=2, top_p=0.5))
@example(parts=[-1.0, -1.0, 1.0], setting=dict(temperature=1e308, top_k=None, top_p=0.01))
def test_warp_is_never_nan_for_finite_logits(dtype, parts, setting):
    """Of any size, at any temperature."""
    probs = warp(tensor(parts, dtype) * torch.finfo(dtype).max, **setting)
    assert probs.isfinite().all() and abs(probs.sum().item() - 1) < ROUNDED


@times(2)
@given(st.lists(st.lists(GRID, min_size=3, max_size=3), min_size=1, max_size=5),
       st.fixed_dictionaries(SETTINGS))
def test_warp_treats_each_row_by_itself_and_writes_to_none(many, setting):
    z = tensor(many)
    together = warp(z, **setting)
    assert z.tolist() == many
    alone = torch.stack([warp(one, **setting) for one in z])
    np.testing.assert_allclose(together.cpu(), alone.cpu(), atol=1e-15)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@times(2)
@given(z=LOGITS, setting=st.fixed_dictionaries(SETTINGS))
def test_probabilities_are_float32_where_the_logits_are_narrower(dtype, z, setting):
    narrow = tensor(z, dtype)
    assert warp(narrow, **setting).dtype == torch.float32
    assert torch.equal(warp(narrow, **setting), warp(narrow.float(), **setting))


@pytest.mark.parametrize("setting", (dict(), dict(temperature=0), dict(temperature=0.7),
                                     dict(top_k=1), dict(top_p=0.5)), ids=str)
def test_nan_logits_give_nan_probabilities_in_their_row_alone(setting):
    z = tensor([[1, math.nan, 0], [1, 2, 0]])
    total = warp(z, **setting).sum(-1)
    assert total[0].isnan() and total[1].item() == pytest.approx(1)


# ---------------------------------------------------------------- warp at its edges

@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64),
                         ids=str)
@pytest.mark.parametrize("temperature", (0, 1e-40, 5e-324, 1e-300))
def test_a_temperature_of_almost_zero_is_the_argmax(temperature, dtype):
    """And not NaN."""
    assert warp(tensor([1, 2, 3], dtype), temperature).tolist() == [0, 0, 1]


def test_a_small_temperature_is_not_yet_zero():
    for temperature in (1e-3, 1e-4, 1e-5):
        probs = warp(tensor([0, temperature], torch.float64), temperature)
        assert probs.tolist() == pytest.approx(tensor([0.0, 1]).softmax(-1).tolist())


@pytest.mark.parametrize("setting", [
    *(dict(temperature=t) for t in (-1, -1e-300, math.nan, math.inf, -math.inf)),
    *(dict(top_k=k) for k in (0, -1)),
    *(dict(top_p=p) for p in (0, -0.1, 1.0001, math.nan, math.inf))], ids=str)
def test_a_setting_out_of_range_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting)).replace("_", "-")):
        warp(tensor([1, 2, 3]), **setting)


@dtypes
@pytest.mark.parametrize("top_p, kept", [(0.4, 1), (0.5, 1), (0.6, 2), (0.875, 3), (1e-8, 1),
                                         (1e-46, 1), (5e-324, 1), (1, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it_exactly(top_p, kept, dtype):
    p = tensor([0.5, 0.25, 0.125, 0.125], dtype)
    probs = warp(p.log(), top_p=top_p)
    assert (probs > 0).tolist() == [i < kept for i in range(4)]
    assert torch.allclose(probs[:kept], p[:kept] / p[:kept].sum())


def test_a_top_p_of_one_changes_no_bit():
    z = torch.randn(100, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for one in (1, 1.0):
        assert torch.equal(warp(z, top_p=one), z.softmax(-1))
    assert torch.equal(warp(z, top_k=7, top_p=1), warp(z, top_k=7))


@pytest.mark.parametrize("top_k, kept", [(None, 4), (1, 1), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_top_k_keeps_exactly_k_where_logits_are_equal(top_k, kept):
    z = tensor([2, 1, 1, 0], torch.float32)
    probs = warp(z, top_k=top_k)
    assert (probs > 0).tolist() == [i < kept for i in range(4)]
    assert torch.allclose(probs[:kept], z[:kept].softmax(-1))


@pytest.mark.parametrize("z", ([3, 3, 0], [0, 3, 3], [1, 1, 1], [0, 0, 3]), ids=str)
def test_top_k_of_one_is_the_token_that_greedy_picks(z):
    z = tensor(z, torch.float32)
    assert torch.equal(warp(z, top_k=1), greedy(z)) and torch.equal(warp(z, top_p=1e-8), greedy(z))


# ---------------------------------------------------------------- seeds

@pytest.mark.parametrize("seed", (-1, -2 ** 64, 2 ** 63, 2 ** 64))
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        seeded(seed)


@pytest.mark.parametrize("seed", (0, 2 ** 63 - 1))
def test_the_least_and_the_greatest_seed_draw(seed):
    check_seed(seed)
    assert seeded(seed)(tensor([[0, 1]])).tolist() == [1]


def test_drawing_again_from_a_seed_draws_the_same():
    p = tensor([0.2, 0.3, 0.5]).expand(200, 3)
    draws = [seeded(seed)(p).tolist() for seed in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]


@rules
def test_a_round_draws_its_coins_at_once_then_its_token(verify):
    """Two draws a round, however many drafts there are: choose is asked for all coins together."""
    p, q = (torch.full((n, 3), 1 / 3, device=DEVICE) for n in (5, 4))
    drafted, draw, shapes = torch.zeros(4, dtype=torch.long, device=DEVICE), seeded(), []
    verify(p, q, drafted, lambda probs: shapes.append(tuple(probs.shape)) or draw(probs))
    assert len(shapes) == 2 and shapes[0][1:] == (2,) and shapes[1] == (3,)
