"""Probability, and nothing else: no model and no cache.

Notation of all that has to do with drafts (model.py explains letters of its own):

    p        the target model's distribution of the next token
    q        the draft model's distribution of the next token
    x        a drafted token, drawn from q
    y        a token of the text
    gamma    how many tokens are drafted in a round (γ)
    alpha    acceptance rate: the mean of Σ min(p, q) over contexts (α)
    c        time of a draft step / time of a plain step (a pass over one row, the draw, the read)
    v        time of a round without its drafts / time of a plain step
    V        size of the vocabulary

These are the letters of Leviathan, Kalman and Matias 2023 (arXiv 2211.17192). Chen et al. 2023
(arXiv 2302.01318) found the same algorithm and swap p and q.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


# ---------------------------------------------------------------- from logits to a distribution

def warp(logits, temperature=1.0, top_k=None, top_p=1.0):
    """The distribution that is sampled from: softmax after temperature, then top-k, then top-p.

    logits (..., V) in any float type -> probabilities (..., V) in float32 or wider, NaN for NaN.
    Both models go through the same warp, and its output is both what is drawn from and what is
    scored: "lossless" means with respect to the warped p (Leviathan et al., section 2.2).
    Temperature 0 is a one-hot argmax, so greedy decoding needs no code of its own anywhere.
    """
    check_settings(temperature, top_k, top_p)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        one_hot = torch.zeros_like(z).scatter_(-1, z.argmax(-1, keepdim=True), 1)
        return one_hot.masked_fill(z.isnan().any(-1, keepdim=True), math.nan)
    if temperature != 1:
        # The largest logit is made 0, which any temperature leaves 0: no inf - inf in the softmax.
        # Bounds that a float32 can hold: as 0 or infinity there would be 0 / 0 or inf / inf.
        z = (z - z.amax(-1, keepdim=True)) / min(max(temperature, 1e-30), 1e30)
    if top_k is None and top_p == 1:
        return z.softmax(-1)
    ranked, order = z.sort(dim=-1, descending=True, stable=True)  # of equal logits the first leads
    probs = ranked[..., :top_k].softmax(-1)
    if top_p < 1:
        before = F.pad(probs.cumsum(-1)[..., :-1], (1, 0))  # probability of all that rank higher
        probs = probs.where(before < max(top_p, 1e-30), 0)  # 1e-30: a smaller float32 would be 0
    probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(z).scatter_(-1, order[..., :top_k], probs)


def check_settings(temperature, top_k, top_p):
    """Raises ValueError for what `warp` cannot do."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or a positive number, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top-k must be at least 1, not {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top-p must be above 0 and at most 1, not {top_p}")


# ---------------------------------------------------------------- drawing

def seeded(device, seed):
    """The draw, `choose(probs)`: the only source of randomness while decoding, fixed by the seed.

    probs (..., V) on the device -> token ids (...), each drawn from its row. A coin that comes up 1
    with probability a is a draw from (1-a, a). The tests replace `choose` by one that replays every
    outcome, and so compute the exact law of the code that calls it.
    """
    check_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)

    def choose(probs):
        # Race of exponential clocks: clock i rings at time E_i / p_i and rings first with
        # probability p_i / Σp. E_i is never 0, so a token of probability 0 never rings.
        clocks = torch.empty_like(probs).exponential_(generator=generator)
        return (probs / clocks).argmax(-1)

    return choose


def check_seed(seed):
    if not 0 <= seed < 2 ** 63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, not {seed}")


# ---------------------------------------------------------------- accept or correct

@dataclass
class Verdict:
    """What a rule decides about the drafts of a round. A rule must give the first two, and write to
    neither p nor q. The trace shows the others, and the first paragraph of the rule's docstring."""
    n: torch.Tensor  # (), how many drafts stand; on the device of p, as all tensors here
    token: torch.Tensor  # (), the token after them
    drawn_from: torch.Tensor = None  # (V,), the distribution of that token
    columns: dict = field(default_factory=dict)  # {title: (γ,)}; the page draws chance and coin
    one_by_one: bool = False  # drafts behind the first rejected one were not tested


def verify_token(p, q, drafted, choose):
    """The token rule tests draft after draft. chance = min(1, p/q): the probability that the
    draft's coin comes up 1. The first draft whose coin is 0 is rejected, and those behind it are
    not tested. A correction is drawn from left = max(0, p - q), divided by its sum; a bonus from p.

    p (γ+1, V), row i judges draft i and the last row is the bonus; q (γ, V), what each draft was
    really drawn from; drafted (γ,), the tokens. (Leviathan et al., Algorithm 1.)
    """
    chance = p_over_q(p[:-1], q, drafted).clamp(max=1)  # (γ,)
    coins = choose(torch.stack([1 - chance, chance], -1))  # (γ,) of 0 and 1
    n = coins.cumprod(0).sum()  # coins after the first 0 do not count
    drawn_from = residual_after(n, p, q)  # (V,)
    columns = {"chance": chance, "coin": coins}
    return Verdict(n, choose(drawn_from), drawn_from, columns, one_by_one=True)


def p_over_q(p, q, drafted):
    """p(x) / q(x) of each token x, (γ,), from as many rows of p as of q. Infinity where q(x) is 0
    or tiny and p(x) is not."""
    x = drafted[:, None]
    return (p.gather(-1, x) / q.gather(-1, x))[:, 0]


def residual(p, q):
    """norm(max(0, p - q)), (V,): what q leaves of p, made to sum to 1 (Leviathan et al., 2.3).
    Where the two are equal up to rounding nothing is left; then it is p."""
    left = (p - q).clamp(min=0)
    left = torch.where(left.sum() > 0, left, p)
    return left / left.sum()


def residual_after(n, p, q):
    """What the token after n drafts is drawn from, (V,). No draft stands in the place of the bonus:
    there q is given a row of zeros, which leaves all of p."""
    return residual(row(p, n), row(F.pad(q, (0, 0, 0, 1)), n))


def row(table, n):
    """Row n of a table, n being a tensor (). table[n] would read n back from the device."""
    return table.index_select(0, n.view(1))[0]


def verify_block(p, q, drafted, choose):
    """The block rule tosses a coin for each draft, and the last coin that is 1 decides: the drafts
    up to it stand. keep: the probability that a draft and all before it stand. chance: that its
    coin is 1, the probability that it and all before it stand, given that no longer run does. A
    correction is drawn from left = max(0, keep·p - q), divided by its sum, with the keep of the
    last draft that stands; a bonus from p.

    Arguments and law of verify_token. It accepts at least as many drafts on average, since a token
    that p likes more than q does makes up for one before it that p likes less. (Sun et al. 2024,
    arXiv 2403.10444, Algorithm 2.)
    """
    keep = block_keep(p, q, drafted)  # (γ+1,)
    keep_p = keep[:, None] * p  # (γ+1, V)
    # Z_i: what the correction behind i drafts has to supply. For h see docs/theory.md, section 2.
    Z = (keep_p[:-1] - q).clamp(min=0).sum(-1)  # (γ,)
    h = torch.where(Z > 0, Z / (Z + (1 - keep[:-1])), 0)
    h = torch.cat([h, keep[-1:]])  # (γ+1,), the run of all γ stands with keep_γ
    coins = choose(torch.stack([1 - h, h], -1))
    # The LARGEST i whose coin comes up; 0 if none does, whatever coin 0 says.
    n = (coins * torch.arange(len(coins), device=p.device)).amax()
    drawn_from = residual_after(n, keep_p, q)  # (V,)
    columns = {"keep": keep[1:], "chance": h[1:], "coin": coins[1:]}
    return Verdict(n, choose(drawn_from), drawn_from, columns)


def block_keep(p, q, drafted):
    """keep_i = P(at least i drafts stand | the first i drafts), of the block rule: (γ+1,)."""
    keep = [p.new_ones(())]
    for ratio in p_over_q(p[:-1], q, drafted).clamp(max=1e30):  # finite, since 0 · inf is NaN
        keep.append((keep[-1] * ratio).clamp(max=1))
    return torch.stack(keep)


VERIFY = {"token": verify_token, "block": verify_block}  # add a rule of your own here
