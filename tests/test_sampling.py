"""sampling.py: from logits to a distribution by the book, and the seeded draw.

numpy, which the program itself does not use for probability, is the independent oracle. The rules
and the residual are in law/test_properties.py.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rigs import DEVICE, greedy, seeded, times
from sampling import check_settings, verify_token, warp

dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
all_dtypes = pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
ROUNDED = 1e-5  # float32: sums of a few products with steps of 6e-8


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# ---------------------------------------------------------------- warp by the book

def reference_warp(z, temperature, top_k, top_p):
    """(probabilities, cumulative sums in rank order), by the book."""
    z = np.array(z)
    order = np.argsort(-z, kind="stable")  # equal logits in the order of their ids
    if temperature == 0:
        return np.eye(len(z))[order[0]], np.ones(1)
    kept = order[:top_k]
    weights = np.exp((z[kept] - z.max()) / temperature)
    probs = weights / weights.sum()
    cumulative = probs.cumsum()
    # The fewest that reach P.
    size = len(kept) if top_p == 1 else 1 + np.searchsorted(cumulative, top_p)
    result = np.zeros(len(z))
    result[kept[:size]] = probs[:size] / probs[:size].sum()
    return result, cumulative


@pytest.mark.parametrize("temperature", (0, 0.25, 0.5, 1, 1.5, 4))
def test_every_combination_of_settings_is_by_the_book(temperature):
    """Each row of four logits by itself, with ties in all places; an edge of top-p that rounding
    would decide is left to the cases below."""
    rows = [list(z) for z in itertools.product((-1.0, 0.0, 2.0), repeat=4)]
    logits = tensor(rows)
    for top_k, top_p in itertools.product((None, 1, 2, 3, 4, 9), (0.1, 0.3, 0.45, 0.8, 0.95, 1)):
        for z, found in zip(rows, warp(logits, temperature, top_k, top_p).cpu()):
            right, cumulative = reference_warp(z, temperature, top_k, top_p)
            if top_p == 1 or np.abs(cumulative - top_p).min() > 1e-9:
                np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-15)
    assert logits.tolist() == rows  # it was not written to


# ---------------------------------------------------------------- warp for all logits

GRID = st.integers(-160, 160).map(lambda i: i / 8)  # ties are common, near-ties impossible
LOGITS = st.lists(GRID, min_size=1, max_size=12)
SETTINGS = dict(temperature=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 4.0]),
                top_k=st.one_of(st.none(), st.integers(1, 14)),
                top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)))


@times(2)
@given(LOGITS, st.fixed_dictionaries(SETTINGS), st.integers(-8000, 8000))
def test_warp_is_temperature_then_top_k_then_top_p(z, setting, eighths):
    """And does not see a constant added to all logits."""
    right, cumulative = reference_warp(z, **setting)
    assume(setting["top_p"] == 1 or np.abs(cumulative - setting["top_p"]).min() > 1e-9)
    for logits in (tensor(z), tensor(z) + eighths / 8):  # the sums are exact in float64
        np.testing.assert_allclose(warp(logits, **setting).cpu(), right, rtol=1e-9, atol=1e-15)


FINITE = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1, width=32),
                   GRID.map(lambda z: z * 1e-38))
EXTREMES = st.one_of(st.sampled_from([0.0, 5e-324, 1e-40, 1e30]), st.floats(0, 1e30))


@dtypes
@times(2)
@given(parts=st.lists(FINITE, min_size=1, max_size=6),
       setting=st.fixed_dictionaries(SETTINGS | {"temperature": EXTREMES}))
@example(parts=[1.0, -1.0], setting=dict(temperature=5e-324, top_k=2, top_p=0.5))
def test_warp_is_never_nan_for_finite_logits(dtype, parts, setting):
    """Of any size, at any temperature."""
    probs = warp(tensor(parts, dtype) * (torch.finfo(dtype).max / 2), **setting)
    assert probs.isfinite().all() and abs(probs.sum().item() - 1) < ROUNDED


# ---------------------------------------------------------------- warp at its edges

@all_dtypes
def test_probabilities_are_float32_or_wider(dtype):
    z = tensor([[1, 2, 3], [3, 3, 0.5]], dtype)
    for setting in (dict(), dict(temperature=0), dict(temperature=0.7, top_k=2, top_p=0.6)):
        assert torch.equal(warp(z, **setting), warp(z.to(warp(z).dtype), **setting))
    assert warp(z).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("setting", (dict(), dict(temperature=0), dict(temperature=0.7),
                                     dict(top_k=1), dict(top_p=0.5)), ids=str)
def test_nan_logits_give_nan_probabilities_in_their_row_alone(setting):
    total = warp(tensor([[1, math.nan, 0], [1, 2, 0]]), **setting).sum(-1)
    assert total[0].isnan() and total[1].item() == pytest.approx(1)


@all_dtypes
@pytest.mark.parametrize("temperature", (0, 1e-40, 5e-324, 1e-300))
def test_a_temperature_of_almost_zero_is_the_argmax(temperature, dtype):
    assert warp(tensor([1, 2, 3], dtype), temperature).tolist() == [0, 0, 1]


@pytest.mark.parametrize("temperature", (1e-3, 1e-4, 1e-5))
def test_a_small_temperature_is_not_yet_zero(temperature):
    probs = warp(tensor([0, temperature]), temperature)
    assert probs.tolist() == pytest.approx(tensor([0.0, 1]).softmax(-1).tolist())


@pytest.mark.parametrize("setting", [
    *(dict(temperature=t) for t in (-1, -1e-300, math.nan, math.inf, -math.inf)),
    *(dict(top_k=k) for k in (0, -1)),
    *(dict(top_p=p) for p in (0, -0.1, 1.0001, math.nan, math.inf))], ids=str)
def test_a_setting_out_of_range_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting)).replace("_", "-")):
        check_settings(**dict(temperature=1, top_k=None, top_p=1) | setting)


@dtypes
@pytest.mark.parametrize("top_p, kept", [(0.4, 1), (0.5, 1), (0.6, 2), (0.875, 3), (1e-8, 1),
                                         (1, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it_exactly(top_p, kept, dtype):
    p = tensor([0.5, 0.25, 0.125, 0.125], dtype)
    probs = warp(p.log(), top_p=top_p)
    assert (probs > 0).tolist() == [i < kept for i in range(4)]
    assert torch.allclose(probs[:kept], p[:kept] / p[:kept].sum())


def test_a_top_p_of_one_changes_no_bit():
    z = torch.randn(100, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(warp(z, top_p=1.0), z.softmax(-1))
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


# ---------------------------------------------------------------- the seeded draw

def test_drawing_again_from_a_seed_draws_the_same():
    p = tensor([0.2, 0.3, 0.5]).expand(200, 3)
    draws = [seeded(seed)(p).tolist() for seed in (0, 1, 0, 2 ** 63 - 1)]
    assert draws[0] == draws[2] and draws[0] != draws[1] != draws[3]


def test_the_token_rule_draws_all_coins_at_once_then_its_token():
    """Two draws a round, however many drafts there are."""
    p, q = (torch.full((n, 3), 1 / 3, device=DEVICE) for n in (5, 4))
    drafted, draw, shapes = torch.zeros(4, dtype=torch.long, device=DEVICE), seeded(), []
    verify_token(p, q, drafted, lambda probs: shapes.append(tuple(probs.shape)) or draw(probs))
    assert shapes == [(4, 2), (1, 3)]
