"""The rejection sampler reproduces the target distribution: for every p, every q, whole texts.

Hypothesis draws p and q and looks for a pair that breaks a property; each pair is then settled
exactly, over every way that the draws can fall. numpy, which the program itself does not use for
probability, is the independent oracle.
"""

import functools
import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exact import EXACT, check_law, every_outcome, law
from rigs import (DEVICE, Bigram, accepted, check_text_law, one_round, our_rules, rules, tables,
                  times)
from sampling import residual, verify_token, warp
from specdec import DraftModel
from variants import verify_block

ROUNDED = 1e-5  # float32: sums of a few hundred products with steps of 6e-8
SINGLE = st.tuples(st.integers(1, 9), st.just(1))  # (V, γ)
SHORT = st.sampled_from([(2, 2), (3, 2), (4, 2), (2, 3)])  # few outcomes; V = 2 alone hides faults


# ---------------------------------------------------------------- tables of p and q

def distributions(vocab):
    """One distribution. Half of them have no zeros; in the others zeros, ties and very small
    numbers are common."""
    odd = st.sampled_from([0, 0, 1, 1, 2, 7, 1e-3, 1e-12, 1e-300])
    lists = [st.lists(weight, min_size=vocab, max_size=vocab)
             for weight in (st.integers(1, 20), st.one_of(st.integers(1, 20), odd))]
    return st.one_of(lists).filter(any).map(lambda w: np.array(w) / sum(w))


def neighbours(p):
    """Rows that differ from p by one step of rounding at most, each probability up or down."""
    ends = st.lists(st.sampled_from([0, 1]), min_size=len(p), max_size=len(p))
    return ends.map(lambda ends: np.nextafter(p, np.array(ends, p.dtype)) * (p > 0))


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


def check_round(verify, p, q, bound=EXACT):
    """The first γ+1 tokens, where the target by itself writes what the round has not, follow p."""
    rows, total = p.cpu().numpy(), defaultdict(float)
    for weight, (drafts, n, token) in every_outcome(one_round(verify, p, q)):
        total[(*drafts[:n], token)] += weight
    found = np.zeros((p.shape[1],) * len(p))
    for new, weight in total.items():
        found[new] += weight * product(rows[len(new):])
    check_law(dict(np.ndenumerate(found)), dict(np.ndenumerate(product(rows))),
              f"of p = {rows.tolist()} and q = {q.tolist()} the text {{}}", bound)


# ---------------------------------------------------------------- one round

@rules
@given(st.one_of(drawn_tables(SINGLE), drawn_tables(SHORT)))
def test_a_whole_round_follows_p_jointly_whatever_q_is(verify, table):
    check_round(verify, *table)


@rules
def test_a_round_follows_p_over_a_grid_of_all_tables(verify):
    """V = 2, γ = 2, and each probability 0, 1/3 or 1: every edge in every combination."""
    for first in itertools.product((0, 1 / 3, 1), repeat=5):
        rows = tables(*([x, 1 - x] for x in first))
        check_round(verify, rows[:3], rows[3:])


@rules
@given(drawn_tables(SHORT, dtype=np.float32))
def test_a_round_follows_p_in_float32_up_to_rounding(verify, table):
    """Also where q is p up to rounding."""
    check_round(verify, *table, ROUNDED)


@our_rules
@given(drawn_tables(SINGLE))
def test_a_draft_is_accepted_with_probability_of_the_overlap(verify, table):
    p, q = table
    found, right = accepted(law(one_round(verify, p, q))), torch.minimum(p[0], q[0]).sum().item()
    assert abs(found - right) < EXACT, f"accepted with {found:.4g}; Σ min(p, q) is {right:.4g}"


@given(drawn_tables(SHORT))
def test_the_block_rule_accepts_no_fewer_drafts(table):
    """Than the token rule, of which P(at least i stand) is the product of i overlaps."""
    p, q = table
    token, block = (accepted(law(one_round(rule, p, q))) for rule in (verify_token, verify_block))
    right = torch.minimum(p[:-1], q).sum(-1).cumprod(0).sum().item()
    assert abs(token - right) < EXACT, f"{token} drafts of the token rule stand; {right} is right"
    assert block > token - EXACT, f"the block rule accepts {block} drafts, the token rule {token}"


@rules
def test_a_draft_of_vanishing_q_makes_no_nan(verify):
    """q(x) = 5e-324 overflows p(x)/q(x), and the draft before it has no chance: 0 · inf."""
    check_round(verify, tables([0, 1], [1, 0], [1, 1]), tables([1, 0], [5e-324, 1]))


@rules
def test_a_round_without_drafts_draws_from_p(verify):
    p = tables([6, 3, 1])
    check_law(law(one_round(verify, p, p[:0])), {((), 0, x): p[0, x].item() for x in range(3)},
              "without drafts (drafts, how many stand, token) = {}")


# ---------------------------------------------------------------- the residual

@pytest.mark.parametrize("p, q, right", [
    ([.6, .3, .1], [.3, .5, .2], [1, 0, 0]), ([.5, .4, .1], [.2, .2, .6], [.6, .4, 0]),
    ([1, 0, 0], [1, 0, 0], [1, 0, 0]), ([.6, .3, .1], [.6, .3, .1], [.6, .3, .1]),
    ([.6, .3, .1], [0, 1, 0], [6 / 7, 0, 1 / 7]), ([.6, .3, .1], [0, 0, 0], [.6, .3, .1])])
def test_the_residual_is_what_q_leaves_of_p_and_p_where_that_is_nothing(p, q, right):
    found = residual(torch.tensor(p, device=DEVICE), torch.tensor(q, device=DEVICE)).tolist()
    assert np.allclose(found, right), f"residual({p}, {q}) is {found}; right is {right}"


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@times(2)
@given(data=st.data())
def test_the_residual_is_a_distribution_within_p(dtype, data):
    """It never supports what p forbids, and is norm(max(0, p - q)) or, where that is nothing, p."""
    p, q = (part[0] for part in data.draw(drawn_tables(SINGLE, dtype)))
    found, (p, q) = residual(p, q).cpu(), (p.cpu().numpy(), q.cpu().numpy())
    assert (found >= 0).all() and abs(found.sum() - 1) < ROUNDED and not found[p == 0].any()
    left = np.maximum(p - q, 0)
    np.testing.assert_allclose(found, left / left.sum() if left.any() else p / p.sum(), rtol=1e-5)


# ---------------------------------------------------------------- whole texts

BIGRAMS = st.tuples(distributions(2), distributions(2)).map(lambda rows: Bigram(np.array(rows)))


@rules
@times(1 / 2)
@given(BIGRAMS, BIGRAMS, st.integers(1, 3), st.sampled_from([None, 0]))
def test_a_whole_text_follows_the_target_whatever_the_draft_is(verify, target, draft, gamma, eos):
    check_text_law(target, lambda: DraftModel(draft, warp), [1], 3, gamma, verify, eos=eos)
