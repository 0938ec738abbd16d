"""Speculative decoding: the algorithm in its plainest form, then the same made fast.

    python specdec.py                decode a text both ways and compare (trains a pair first, once)
    python trace.py                  the same, one round at a time
    python bench.py                  where the time goes, and what theory predicts

A pass of the target model takes about as long for a few tokens as for one. So a small draft model
writes gamma tokens ahead, the target judges all of them in one pass, and a rule accepts as many as
it can while the text still follows the target's own distribution. sampling.py explains the letters.
"""

from dataclasses import dataclass, field
from functools import partial

import torch

from model import check_vocabulary
from sampling import VERIFY, Verdict, seeded, verify_token


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
    else:  # none rejected: one more token from p
        token = choose(p_rows[n])
    return drafts[:n] + [token.item()]


# ---------------------------------------------------------------- plain decoding, the baseline

# What the loops below ask of a model, so that one of another make can stand in its place:
#   model.config.vocab_size   V: there are as many logits, in the order of the token ids
#   model.config.context      the most tokens that one text can hold
#   model.config.tokenizer    a name of the vocabulary: target and draft model must have the same
#   model.device              where its inputs and outputs are
#   model.new_cache()         an object with `length`, how many tokens it holds, 0 at first. Setting
#                             it lower forgets the tokens behind; it is never set higher.
#   model(ids, cache, rows)   feeds ids (1, T) after the tokens in the cache and adds them to it;
#                             logits (1, rows, V) of the last `rows` of them

def plain(target, tokens, max_new, warp, choose, eos=None):
    """Autoregressive decoding with a cache: one target pass, one token. Yields up to max_new ids.

    tokens: ids of the prompt, at least one. warp: logits -> probabilities. choose: see
    sampling.seeded. eos: the id that ends a text. ValueError where the context is too small.
    """
    tokens, cache = list(tokens), target.new_cache()
    check_room(target, tokens, max_new)
    for _ in range(max_new):
        p = distributions(target, unread(tokens, cache, target.device), cache, warp)  # (1, V)
        (token,) = read([choose(p)], p.sum())
        tokens.append(token)
        yield token
        if token == eos:
            return


def unread(tokens, cache, device):
    """What a cache lacks of a text, (T,): the tokens to feed next."""
    return torch.tensor(tokens[cache.length:], device=device)


@torch.inference_mode()  # there is nothing to train
def distributions(model, feed, cache, warp, rows=1):
    """Feed ids (T,) after what the cache holds. Returns the distribution of the token after each of
    the last `rows` of them, (rows, V)."""
    return warp(model(feed[None], cache, rows)[0])


def read(parts, total):
    """The one transfer from device to host a round: all integers of these tensors, as a list.

    total: the sum of all distributions. One NaN among them makes it NaN: a ValueError.
    """
    *values, is_nan = torch.cat([part.view(-1) for part in (*parts, total.isnan())]).tolist()
    if is_nan:
        raise ValueError("a model's logits are NaN")
    return values


def check_room(target, tokens, max_new):
    """Raises ValueError unless a prompt is there and the context holds it and the new tokens."""
    if not tokens:
        raise ValueError("the prompt is empty: start from the end-of-text token")
    most = target.config.context + 1  # the last token is never fed
    if len(tokens) + max_new > most:
        raise ValueError(f"the context of {target.config.context} has room for {most} tokens in "
                         f"all, and not for {len(tokens)} of the prompt and {max_new} new ones")


# ---------------------------------------------------------------- speculative decoding

# What the loop asks of a drafter, propose(tokens, gamma, choose) -> (drafted, q), both on the
# target's device:
#   drafted (γ,)              ids that may follow the text `tokens`: gamma of them, or fewer
#   q (γ, V)                  the distribution that each of them was really drawn from

def speculative(target, propose, tokens, max_new, gamma, warp, choose, verify=verify_token,
                eos=None):
    """Text with the law of `plain`, in fewer target passes. Yields a Round a pass.

    propose: a drafter, see above. verify: a rule, see sampling. The others are as in `plain`.
    ValueError where the context is too small, or where the drafter breaks its contract.
    """
    tokens, cache, vocab_size = list(tokens), target.new_cache(), target.config.vocab_size
    check_room(target, tokens, max_new)
    if isinstance(propose, DraftModel):
        check_vocabulary(target.config, propose.model.config, "draft")
    end = len(tokens) + max_new
    while len(tokens) < end:
        # What the target has not read, (T,): the last token, and at first all of the prompt. A copy
        # to a GPU waits until the GPU is idle, so it is made before the drafts.
        before, unfed = cache.length, unread(tokens, cache, target.device)

        # 1. Draft. The round adds one token of the target's own: draft one fewer than are left.
        asked = min(gamma, end - len(tokens) - 1)
        drafted, q = propose(tokens, asked, choose)  # (γ,), (γ, V)
        check_drafts(drafted, q, asked, vocab_size)

        # 2. One target pass over what it has not read and all drafts.
        # An id beyond the vocabulary would crash a GPU: clamped here, refused after the read.
        safe = drafted.clamp(0, vocab_size - 1)
        feed = torch.cat([unfed, safe])
        p = distributions(target, feed, cache, warp, rows=len(drafted) + 1)  # (γ+1, V)

        # 3. Accept a run of drafts, and draw the token after it: correction or bonus.
        verdict = verify(p, q, safe, choose)
        n, token, *drafts = read([verdict.n, verdict.token, drafted], p.sum() + q.sum())
        if any(not 0 <= x < vocab_size for x in drafts):
            raise ValueError(f"drafted ids must be from 0 to {vocab_size - 1}, not {drafts}")

        # 4. Commit, up to an end of text.
        new = drafts[:n] + [token]
        if eos in new:
            new = new[:new.index(eos) + 1]
        tokens += new

        # 5. Roll the cache back to what is still true of the text. Its last token is not fed yet.
        fed = cache.length
        cache.length = len(tokens) - 1
        accepted = min(n, len(new))  # an end of text may have cut some off
        yield Round(drafts, accepted, new, before, fed, cache.length, verdict, p, q)
        if new[-1] == eos:
            return


@dataclass
class Round:
    """What one pass of the target brought. Text, trace and bench are all made from these."""
    drafts: list  # ids that the drafter proposed, also those behind an end of text
    accepted: int  # how many of them joined the text
    new: list  # all ids that joined it: those, and the target's own unless the text ends before it
    cache_before: int  # tokens in the target's cache before the pass
    cache_fed: int  # after the pass
    cache_kept: int  # after the rollback
    verdict: Verdict = field(repr=False)
    p: torch.Tensor = field(repr=False)  # (γ+1, V)
    q: torch.Tensor = field(repr=False)  # (γ, V)

    @property
    def writers(self):
        """Who wrote each token of `new`: "draft", and at the end "correction" or "bonus"."""
        own = "correction" if self.accepted < len(self.drafts) else "bonus"
        return ["draft" if i < self.accepted else own for i in range(len(self.new))]

    @property
    def tested(self):
        """Drafts up to the first rejection, it included; the token rule tests no more."""
        return self.accepted + self.writers.count("correction")


def check_drafts(drafted, q, asked, vocab_size):
    """Raises ValueError where a drafter gives what the loop cannot use."""
    if drafted.dim() != 1 or len(drafted) > asked or q.shape != (len(drafted), vocab_size):
        raise ValueError(f"the drafter must give n drafts, (n,), and q, (n, {vocab_size}), with n "
                         f"at most {asked}: it gave {tuple(drafted.shape)} and {tuple(q.shape)}")


# ---------------------------------------------------------------- drafters

class DraftModel:
    """A drafter that decodes with a small model. Make one for each text: it keeps its cache."""

    def __init__(self, model, warp):
        self.model, self.warp, self.cache = model, warp, model.new_cache()

    def __call__(self, tokens, gamma, choose):
        self.cache.length = min(self.cache.length, len(tokens) - 1)  # forget rejected drafts
        feed = unread(tokens, self.cache, self.model.device)  # (T,)
        # Each begins with a part without rows, so that no drafts at all can be joined, too.
        drafted, q = [feed[:0]], [torch.empty(0, self.model.config.vocab_size, device=feed.device)]
        room = self.model.config.context + 1 - len(tokens)  # the last draft is never fed
        for _ in range(min(gamma, room)):
            q.append(distributions(self.model, feed, self.cache, self.warp))  # (1, V)
            drafted.append(choose(q[-1]))  # (1,)
            feed = drafted[-1]  # the model reads its own draft next
        return torch.cat(drafted), torch.cat(q)  # (γ,), (γ, V)


def prompt_lookup(vocab_size, device, eos=None):
    """A drafter without a model: what followed the same words earlier in the text, up to an end of
    text. Its q is one-hot: nothing was drawn, it would have proposed the same with certainty."""
    def propose(tokens, gamma, choose):
        ids = continuation(tokens)[:gamma]
        if eos in ids:
            ids = ids[:ids.index(eos) + 1]
        drafted = torch.tensor(ids, dtype=torch.long, device=device)  # (γ,)
        q = torch.zeros(len(ids), vocab_size, device=device).scatter_(1, drafted[:, None], 1)
        return drafted, q

    return propose


def continuation(tokens):
    """What followed the longest end of the text that occurred before, the last time it did."""
    longest, place = 0, len(tokens)
    for end in reversed(range(1, len(tokens))):
        n = 0  # how many tokens before `end` are also the last tokens of the text
        while n < end and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        if n > longest:
            longest, place = n, end
        if longest >= end - 1:
            break  # nothing earlier can be longer
    return tokens[place:]


DRAFTERS = {  # add a drafter of your own here
    "model": lambda pair, warp: DraftModel(pair.draft, warp),
    "lookup": lambda pair, warp: prompt_lookup(pair.encoding.n_vocab, pair.target.device,
                                               pair.encoding.eot_token),
}


# ---------------------------------------------------------------- one text, both ways

def decode_plain(pair, tokens, settings, eos=None):
    """The target alone: yields the new ids."""
    choose = seeded(pair.target.device, settings.seed)
    return plain(pair.target, tokens, settings.max_new, settings.warp(), choose, eos)


def decode_speculative(pair, tokens, settings, eos=None, propose=None):
    """Draft and target: yields a Round a pass. propose: a drafter, in place of a new one."""
    propose = propose or DRAFTERS[settings.drafter](pair, settings.warp())
    choose, gamma = seeded(pair.target.device, settings.seed), settings.gamma or pair.gamma
    return speculative(pair.target, propose, tokens, settings.max_new, gamma, settings.warp(),
                       choose, VERIFY[settings.verify], eos)


def main(arguments=None):
    import program  # not above: the loop needs sampling.py and model.py alone
    options = program.decoding_parser("Write a text both ways.", DRAFTERS).parse_args(arguments)
    with program.edges():
        pair, settings, tokens = program.prepared(options)
        check_room(pair.target, tokens, settings.max_new)
        coming = decode_speculative(pair, tokens, settings, pair.encoding.eot_token)
        rounds = program.stream(tokens, coming, pair.encoding)
        figures = {}
        if settings.max_new > 0:
            figures = compare(pair, tokens, settings, program.stopwatch(pair.target.device))
            print_comparison(figures, rounds)
            print(f"on {pair.machine()}")
        program.write_json(options.json, {**figures, "rounds": rounds})


def compare(pair, tokens, settings, now):
    """Decode one text both ways, past an end of text so that both do the same work. The figures."""
    from program import race, rates, tally
    ways = [partial(way, pair, tokens, settings) for way in (decode_plain, decode_speculative)]
    race(ways, now, repeats=1)  # the first run of each is slow: it does not count
    (ids, rounds), (plain_seconds, seconds) = race(ways, now)
    return {**vars(settings), "plain_new_tokens": len(ids), **tally(rounds),
            **rates(len(ids), plain_seconds, seconds)}


def print_comparison(figures, rounds):
    """Both ways side by side, and who wrote the text that was printed above."""
    from program import COLOURS, coloured
    print("\n             tokens/s  new tokens  passes  tokens/pass  accepted/tested\n"
          "plain       {plain_tokens_per_s:9.0f}{plain_new_tokens:12}{plain_new_tokens:8}"
          "         1.00\n"
          "speculative {speculative_tokens_per_s:9.0f}{new_tokens:12}{passes:8}"
          "{tokens_per_pass:13.2f}{accepted:13}/{tested}\n"
          "speedup {speedup:.2f}x ({runs} runs: {speedup_min:.2f} to {speedup_max:.2f}), "
          "gamma {gamma}".format(**figures))
    writers = [writer for one in rounds for writer in one.writers]
    if len(writers) < figures["new_tokens"]:
        print(f"the text ended after {len(writers)} tokens; both ways were timed past that")
    print("written by: " + ", ".join(coloured(f"{writer} {writers.count(writer)}", writer)
                                     for writer in COLOURS))


if __name__ == "__main__":
    main()
