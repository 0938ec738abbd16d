"""Speculative decoding: the algorithm as it is printed, then the same made fast.

    python specdec.py               write a text both ways and compare (trains a pair first, once)
    python -m programs.trace        a page that shows it one round at a time
    python -m programs.bench        where the time goes, and what theory predicts

A pass of the target model takes about as long for a few tokens as for one. So a small draft model
writes gamma tokens ahead, the target judges all of them in one pass, and a rule accepts as many as
it can while the text still follows the target's own distribution. sampling.py explains the letters.
"""

from dataclasses import dataclass, field

import torch

from sampling import verify_token


# ---------------------------------------------------------------- the idea

def algorithm_1(p, q, tokens, gamma, choose):
    """One round of Leviathan et al. 2023, Algorithm 1. Returns the new tokens.

    p(tokens) and q(tokens) are the target's and the draft's distribution of the next token, (V,)
    for a vocabulary of V tokens. choose(probs) draws from a distribution, and also tosses the coin,
    for which the paper takes a uniform number.
    """
    # The draft model writes gamma tokens, one after another.
    drafts, q_rows = [], []
    for _ in range(gamma):
        q_rows.append(q(tokens + drafts))
        drafts.append(choose(q_rows[-1]).item())

    # The target model judges all of them. These γ+1 calls are one pass in the fast loop below.
    p_rows = [p(tokens + drafts[:i]) for i in range(gamma + 1)]

    # Accept draft x with probability min(1, p(x) / q(x)), up to the first rejection.
    n = 0
    while n < gamma:
        accept = (p_rows[n][drafts[n]] / q_rows[n][drafts[n]]).clamp(max=1)
        if choose(torch.stack([1 - accept, accept])) == 0:  # a coin: 1 with probability `accept`
            break
        n += 1

    if n < gamma:  # rejected: correct the draft with what q leaves of p
        left = (p_rows[n] - q_rows[n]).clamp(min=0)
        token = choose(left / left.sum())
    else:  # none rejected: one more token from p, the bonus
        token = choose(p_rows[n])
    return drafts[:n] + [token.item()]


# ---------------------------------------------------------------- plain decoding, the baseline

# What the loops below ask of a model, so that one of another make can stand in its place:
#   model.config.vocab_size   V: there are as many logits, in the order of the token ids
#   model.config.context      the most tokens that it can read of one text
#   model.device              where its inputs and outputs are
#   model.new_cache()         an object whose `length` says how many tokens it holds, 0 at first.
#                             Setting it lower forgets the tokens behind; it is never set higher.
#   model(ids, cache)         reads ids (1, T) after the tokens in the cache, which then holds T
#                             more. Returns logits (1, T, V). They depend on the text up to each
#                             token and on nothing else: no dropout, and nothing that was forgotten.
# Plain decoding forgets nothing, so a cache that cannot do it shows no fault there, and the text of
# the fast loop is wrong. check_model in tests/law/test_law.py finds that in any model.

@torch.inference_mode()  # nothing is trained, by what is called from here either
def plain(target, tokens, max_new, *, warp, choose, eos=None):
    """Autoregressive decoding with a cache: one target pass, one token. Yields up to max_new ids.

    tokens: ids of the prompt, at least one. warp: logits -> probabilities. choose: see
    sampling.seeded. eos: the id that ends a text. ValueError where the context is too small.
    """
    check_room(target, tokens, max_new)
    tokens, cache = list(tokens), target.new_cache()
    for _ in range(max_new):
        ids = uncached(tokens, cache, target.device)  # (1, T): the prompt, then one token at a time
        p = warp(target(ids, cache)[0, -1])  # (V,)
        sums_to_1 = (p.sum() - 1).abs() < 1e-3  # a row with a NaN does not
        (token,), (is_law,) = to_host(choose(p), sums_to_1)
        if not is_law:
            raise ValueError("the target's logits are NaN")
        tokens.append(token)
        yield token
        if token == eos:
            return


def uncached(tokens, cache, device):
    """The ids of a text that a cache does not hold, (1, T): what the model reads next."""
    if cache.length >= len(tokens):
        raise ValueError(f"{cache.length} of {len(tokens)} tokens are cached: was it rolled back?")
    return torch.tensor([tokens[cache.length:]], device=device)


def to_host(*tensors):
    """Whole numbers from the device to the host in one transfer: a list for each tensor."""
    together = torch.cat([tensor.long().view(-1) for tensor in tensors]).cpu()
    return [part.tolist() for part in together.split([tensor.numel() for tensor in tensors])]


def check_room(target, tokens, max_new):
    """ValueError unless a prompt is there and the context holds it and the new tokens."""
    if not tokens:
        raise ValueError("the prompt is empty: start from the end-of-text token")
    most = target.config.context + 1  # the last token is never read
    if len(tokens) + max_new > most:
        raise ValueError(f"the context of {target.config.context} has room for {most} tokens in "
                         f"all, and not for {len(tokens)} of the prompt and {max_new} new ones")


# ---------------------------------------------------------------- speculative decoding

# What the loop asks of a drafter, propose(tokens, gamma, choose) -> (drafted, q), both on the
# target's device:
#   drafted (k,)              ids that may follow the text `tokens`, k <= gamma; k may be 0
#   q (k, V)                  the distribution that each of them was really drawn from; one-hot
#                             where nothing was drawn

@torch.inference_mode()
def speculative(target, propose, tokens, max_new, *, gamma, warp, choose, verify=verify_token,
                eos=None):
    """Text with the law of `plain`, in fewer passes. Yields one Round for each target pass.

    propose: a drafter, see above. verify: a rule, see sampling.verify_token. The others are as in
    `plain`. ValueError where the context is too small, or the drafter breaks its contract.
    """
    check_room(target, tokens, max_new)
    tokens, cache = list(tokens), target.new_cache()
    end = len(tokens) + max_new
    while len(tokens) < end:
        # The last token of the text, which came from a draw and was read by no pass; at first the
        # whole prompt. (Made before the drafts: a copy to a GPU waits until the GPU is idle.)
        last = uncached(tokens, cache, target.device)  # (1, T)

        # 1. Draft. One fewer than are left, since a round adds a token of the target's own.
        asked = min(gamma, end - len(tokens) - 1)
        drafted, q = propose(tokens, asked, choose)  # (k,), (k, V)

        # 2. One pass of the target. The row of the last token judges the first draft, the row of a
        #    draft judges the next one, and the row of the last draft is for the bonus.
        rows, before = len(drafted) + 1, cache.length
        logits = target(torch.cat([last, drafted[None]], 1), cache)[0, -rows:]
        p = warp(logits)  # (k+1, V)
        if len(drafted) > asked or q.shape != p[:-1].shape:
            raise ValueError(f"asked for {asked} drafts, the drafter gave {len(drafted)} with q of "
                             f"shape {tuple(q.shape)}; p has the shape {tuple(p.shape)}")

        # 3. Accept the first n drafts, and draw the token after them: correction or bonus.
        n, token = verify(p, q, drafted, choose)  # (), ()

        # 4. Read the outcome: the one transfer from the device to the host in a round.
        sums_to_1 = [(probs.sum(-1) - 1).abs() < 1e-3 for probs in (p, q)]  # (k+1,), (k,)
        (n,), (token,), drafts, p_is_law, q_is_law = to_host(n, token, drafted, *sums_to_1)
        if not all(q_is_law):
            raise ValueError("the drafter's q is no distribution: its rows must sum to 1")
        if not p_is_law[n]:  # others may be NaN: a draft that p forbids is rejected before them
            raise ValueError("the target's logits are NaN")

        # 5. Commit, up to an end of text.
        new = drafts[:n] + [token]
        if eos in new:
            new = new[:new.index(eos) + 1]
        tokens += new

        # 6. Roll the cache back to the text without its last token, which the next round reads.
        after = cache.length
        cache.length = len(tokens) - 1
        yield Round(drafts, min(n, len(new)), new, (before, after, cache.length), p, q)
        if new[-1] == eos:
            return


@dataclass
class Round:
    """What one pass of the target brought. Text, trace and bench are all made from these."""
    drafts: list  # ids that were proposed, also those behind an end of text
    accepted: int  # how many of them joined the text
    new: list  # all ids that joined it: those, and the target's own unless a draft ended the text
    cache: tuple  # tokens in the target's cache: before the pass, after it, after the rollback
    p: torch.Tensor = field(repr=False)  # (k+1, V)
    q: torch.Tensor = field(repr=False)  # (k, V)

    @property
    def writers(self):
        """Who wrote each token of `new`: "draft", and at the end "correction" or "bonus"."""
        own = "correction" if self.accepted < len(self.drafts) else "bonus"
        return ["draft" if i < self.accepted else own for i in range(len(self.new))]


class DraftModel:
    """The draft model as a drafter. Make one for each text: it keeps that text's cache."""

    def __init__(self, model, warp):
        self.model, self.warp, self.cache = model, warp, model.new_cache()

    @torch.inference_mode()
    def __call__(self, tokens, gamma, choose):
        # Rejected drafts leave the cache. Where all were accepted there are none, and two tokens
        # are unread: the last draft, which was written and never read, and the bonus.
        self.cache.length = min(self.cache.length, len(tokens) - 1)
        ids = uncached(tokens, self.cache, self.model.device)  # (1, T)
        room = self.model.config.context + 1 - len(tokens)  # the last draft is never read
        drafted, q = [], []
        for _ in range(min(gamma, room)):
            q.append(self.warp(self.model(ids, self.cache)[0, -1]))  # (V,)
            drafted.append(choose(q[-1]))  # ()
            ids = drafted[-1].view(1, 1)  # the model reads its own draft next
        if not drafted:
            return ids.new_empty(0), torch.empty(0, self.model.config.vocab_size, device=ids.device)
        return torch.stack(drafted), torch.stack(q)  # (k,), (k, V)


def main():
    from programs import decode  # not above: the core needs none of the programs
    decode.main()


if __name__ == "__main__":
    main()
