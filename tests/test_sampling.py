"""sampling.py: from logits to a distribution by the book, and the seeded draw.

numpy, which the program itself does not use for probability, is the independent oracle. The rules
and the residual are in law/test_properties.py.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rigs import DEVICE, seeded, times
from sampling import check_settings, warp

dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
all_dtypes = pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
ROUNDED = 1e-5  # float32: sums of a few products with steps of 6e-8


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# ---------------------------------------------------------------- warp by the book

def test_top_p_is_of_what_top_k_left_and_of_equal_tokens_the_first_ones_stay():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert warp(p.log(), top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]
    assert warp(torch.zeros(600), top_k=3).nonzero().flatten().tolist() == [0, 1, 2]


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


GRID = st.integers(-160, 160).map(lambda i: i / 8)  # ties are common, near-ties impossible
LOGITS = st.lists(GRID, min_size=1, max_size=12)
SETTINGS = dict(temperature=st.sampled_from([0.0, 1e-4, 0.25, 0.5, 1.0, 1.5, 4.0]),
                top_k=st.one_of(st.none(), st.integers(1, 14)),
                top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)))


@times(2)
@given(LOGITS, st.fixed_dictionaries(SETTINGS), st.integers(-8000, 8000))
def test_warp_is_temperature_then_top_k_then_top_p(z, setting, eighths):
    """Each row by itself. It does not see a constant added to all logits of a row, nor write to
    them. An edge of top-p that rounding would decide is left to the cases below."""
    right, cumulative = reference_warp(z, **setting)
    assume(setting["top_p"] == 1 or np.abs(cumulative - setting["top_p"]).min() > 1e-9)
    logits = torch.stack([tensor(z), tensor(z) + eighths / 8])  # the sums are exact in float64
    before = logits.clone()
    for found in warp(logits, **setting).cpu():
        np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-15)
    assert torch.equal(logits, before)


@dtypes
@pytest.mark.parametrize("temperature", (0, 5e-324, 1e-40, 0.5, 1, 1e30))
def test_warp_is_never_nan_for_finite_logits(temperature, dtype):
    """Of any size, at any temperature."""
    most, least = torch.finfo(dtype).max / 2, torch.finfo(dtype).tiny
    logits = tensor(list(itertools.product((-most, 0, least, most), repeat=3)), dtype)
    for setting in ({}, dict(top_k=2), dict(top_p=0.5)):
        probs = warp(logits, temperature, **setting)
        assert probs.isfinite().all() and ((probs.sum(-1) - 1).abs() < ROUNDED).all()


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


@pytest.mark.parametrize("setting", (dict(temperature=-1), dict(top_k=0), dict(top_p=0)), ids=str)
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


# ---------------------------------------------------------------- the seeded draw

def test_drawing_again_from_a_seed_draws_the_same():
    p = tensor([0.2, 0.3, 0.5]).expand(200, 3)
    draws = [seeded(seed)(p).tolist() for seed in (0, 1, 0, 2 ** 63 - 1)]
    assert draws[0] == draws[2] and draws[0] != draws[1] != draws[3]
