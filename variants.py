"""Another rule and another drafter, through the seams of specdec.py, as your own would go in.

A file of your own adds to the tables at the end, for --use FILE: see examples/mine.py.
"""

import torch

from sampling import residual, verify_token
from specdec import DraftModel


def verify_block(p, q, drafted, choose):
    """The block rule (Sun et al. 2024, arXiv 2403.10444, Algorithm 2). Arguments, results and law
    of sampling.verify_token.

    keep_i is the probability that at least i drafts stand, given the first i: min(1, keep_(i-1) ·
    p/q). It may rise again: a draft that p likes more than q does makes up for one that p likes
    less. So on average it accepts at least as many drafts as the token rule. docs/theory.md,
    section 2, shows why the coins below give these probabilities.
    """
    keep = block_keep(p, q, drafted)  # (k+1,) from keep_0 = 1 on
    # Behind a draft with p = 0 a row may be NaN. There keep is 0, so the row does not count.
    kept_p = torch.where(keep[:, None] > 0, keep[:, None] * p, 0)  # (k+1, V)
    # Of the token behind i drafts: what no draft can supply, so that the run has to end there.
    missing = (kept_p[1:-1] - q[1:]).clamp(min=0).sum(-1)  # (k-1,), of i = 1 ... k-1
    chance = torch.where(missing == 0, 0, missing / (missing + (1 - keep[1:-1])))
    chance = torch.cat([chance, keep[1:][-1:]])  # (k,): that coin i comes up, for i = 1 ... k
    chance = chance.nan_to_num(1)  # a NaN that counts: stop at it, and the loop raises
    coins = choose(torch.stack([1 - chance, chance], -1))  # (k,)

    # The LARGEST i whose coin comes up, and 0 if none does.
    i = torch.arange(1, len(drafted) + 1, device=p.device)
    n = torch.cat([i.new_zeros(1), coins * i]).amax()

    q_and_zeros = torch.cat([q, torch.zeros_like(p[-1:])])  # (k+1, V)
    row = n[None]
    return n, choose(residual(kept_p[row], q_and_zeros[row]))[0]


def block_keep(p, q, drafted):
    """keep_0 ... keep_k, (k+1,)."""
    x = drafted[:, None]
    ratio = (p[:-1].gather(-1, x) / q.gather(-1, x))[:, 0].nan_to_num(0)  # (k,) p(x) / q(x)
    keep = [p.new_ones(())]
    for factor in ratio.clamp(max=1e30):  # finite, since 0 · inf is NaN
        keep.append((keep[-1] * factor).clamp(max=1))
    return torch.stack(keep)


def prompt_lookup(vocab_size, device, eos=None):
    """A drafter without a model: what followed the same words earlier in the text, up to an end of
    text. Its q is one-hot: nothing was drawn, it would have proposed the same with certainty."""
    def propose(tokens, gamma, choose):
        ids = continuation(tokens)[:gamma]
        if eos in ids:
            ids = ids[:ids.index(eos) + 1]
        drafted = torch.tensor(ids, dtype=torch.long, device=device)  # (k,)
        q = torch.zeros(len(ids), vocab_size, device=device).scatter_(1, drafted[:, None], 1)
        return drafted, q

    return propose


def continuation(tokens, longest=8):
    """What followed the longest end of the text, of at most 8 tokens, that stood there before; the
    last time that it did."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start:start + size] == tokens[-size:]:
                return tokens[start + size:]
    return []


RULES = {"token": verify_token, "block": verify_block}

DRAFTERS = {  # name: a function of the pair and the warp that makes the drafter of one text
    "model": lambda pair, warp: DraftModel(pair.draft, warp),
    "lookup": lambda pair, warp: prompt_lookup(pair.target.config.vocab_size, pair.target.device,
                                               pair.encoding.eot_token),
}
