"""The ladder: write speculative decoding yourself, in seven steps, and run it.

This is your file. Write a step in place of its `raise NotImplementedError`; each takes 3 to 15
lines. The answers stand in sampling.py, specdec.py and exercises/stand_ins.py: keep those closed,
and Algorithm 1 open, as the README prints it. What you need of `Round` and `check_room` is below.

    python -m pytest exercises                  which steps stand, and what is wrong with the others
    python -m pytest exercises -k verify_token  the same of one step

No step needs another. A step may call those before it, and what you have not written is done by the
reference meanwhile. So begin with any, and run all of it at any time: see step 8, the end.

    p, q      distributions of the target and of the draft model, in rows (..., V), V tokens
    drafted   (k,) ids that the draft model wrote; k may be 0. `drafts` is the same as a list
    n         how many of them stand: the first n
    tokens    the text, a list of ids; its last one has been drawn, and not been read by the target
    choose    choose(probs) draws from each row of probs, (..., V) -> (...). All draws go through
              it, so that the grading can go through all that may happen. A coin that comes up 1
              with probability a is choose(torch.stack([1 - a, a])).
"""

import torch

from specdec import Round, check_room


def residual(p, q):
    """1. The distribution of a correction: max(0, p - q) of each token, made to sum to 1.

    p and q are (..., V), and so is the result: sum each row by itself (dim=-1, keepdim=True). Where
    a row of p equals that of q nothing is left, and 0 / 0 is NaN: then the row is p. Do not write
    into p or q.
    """
    raise NotImplementedError


def verify_token(p, q, drafted, choose):
    """2. The rule: how many drafts stand, and the token after them. Returns (n, token).

    p (k+1, V): row i judges draft i, and the last row is for the bonus. q (k, V): row i is what
    draft i was drawn from. Draft x stands with probability min(1, p(x) / q(x)); toss a coin. The
    first that falls is the end: those behind it are not looked at. Then `token` is the correction,
    drawn from the residual of the two rows at that place. If all stand, or k is 0, it is the bonus,
    drawn from the last row of p.

    Loops over drafts are fine. Write into none of the arguments. Return tensors of shape ():
    torch.tensor(n, device=p.device), and a token as choose gives it.
    """
    raise NotImplementedError


def feed(tokens, length, drafts):
    """3. One pass judges all: what the target reads in a round, and which rows of its answer judge.
    Returns (ids, rows), two lists.

    length is how many tokens of the text the target's cache holds: 0 at first, later all but the
    last. ids are what is to be read: all that the cache lacks of the text, then the drafts. For
    each of these ids the target gives a row: the distribution of the token AFTER it. rows are the
    numbers of the k+1 rows that count, 0 being the row of the first of ids: rows[i] judges draft i,
    and the last one is for the bonus. Do not write into the lists given.
    """
    raise NotImplementedError


def commit(tokens, cache, drafts, n, token, eos):
    """4. The end of a round, and the rollback: the text grows, and the cache forgets. Returns
    `new`, the list of ids that joined the text.

    These are the first n drafts, then token (a number here); but where eos, the id that ends a
    text, is among them, none behind it. (eos may be None: then nothing ends it.) Add them to
    tokens, the caller's own list.

    The cache holds the text as it was, and all the drafts, since the pass has read them;
    cache.length says how many tokens that is, and setting it lower forgets those behind. Make it
    hold the text as it is now, without the last token: no pass has read that one, and the next pass
    must have one to read. (Where a draft ended the text it has been read; leave it out as well.)
    """
    raise NotImplementedError


class DraftModel:
    """5. The draft model as a drafter. A text has one of its own, which keeps that text's cache."""

    def __init__(self, model, warp):  # given
        self.model, self.warp, self.cache = model, warp, model.new_cache()

    @torch.inference_mode()
    def __call__(self, tokens, gamma, choose):
        """Writes gamma drafts, one after another. Returns drafted (k,) and q (k, V).

        Since the last call some drafts may have been rejected, and the cache must forget them: all
        that it holds beyond the text without its last token. If none was rejected it holds less,
        and lacks not one but two tokens: the last draft, which was written and never read, and the
        bonus.

        self.model(ids, self.cache), with ids (1, T) on self.model.device, reads ids after what the
        cache holds, adds them to it, and gives logits (1, T, V), a row for each id. self.warp makes
        logits (..., V) a distribution (..., V). So: read what is unread of the text, draw a draft
        from the last row, read that draft alone, draw the next, and so on. The last draft is not
        read: gamma drafts take gamma passes, and these are slow.

        gamma may be 0: then the shapes are (0,) and (0, V), V being self.model.config.vocab_size.
        And the model reads at most self.model.config.context tokens of one text: draft fewer, or
        none, where there is no room. drafted is in torch.long; both are on the model's device.
        """
        raise NotImplementedError


def one_round(target, cache, propose, tokens, *, gamma, warp, choose, verify, eos):
    """6. A round: steps 3, 2 and 4 around one pass of the target. Returns a Round.

    propose(tokens, gamma, choose) gives (drafted, q), as a DraftModel does. The target reads once:
    target(ids, cache), with ids (1, T) on target.device, gives logits (1, T, V). The rows that
    count go through warp, and are p. verify(p, q, drafted, choose) is a rule as in step 2. feed and
    commit want numbers: drafted.tolist(), token.item().

    Round(drafts, accepted, new, cache, p, q) says what happened: drafts is the list, accepted how
    many of them joined the text (fewer than n where an end of text came before; a draft that is one
    counts), new is from commit, and cache its three lengths: before the pass, after it, after
    commit.
    """
    raise NotImplementedError


@torch.inference_mode()
def speculative(target, propose, tokens, max_new, *, gamma, warp, choose, verify, eos=None):
    """7. The loop: max_new new tokens, or up to an end of text. Yields the Round of each pass.

    Copy the caller's tokens, make one target.new_cache() for the whole text, and let rounds follow
    one another. A round adds up to gamma drafts and then a token of the target's own: ask it for
    fewer drafts where fewer tokens are left, and the last round ends exactly at max_new.
    """
    check_room(target, tokens, max_new)  # given: whether the context is large enough
    raise NotImplementedError


# 8. Nothing more to write: your own core writes a text, in the colours of its writers, and tells
# its speedup over plain decoding; then round by round; then its time against theory, for one gamma:
#
#   python specdec.py --use exercises/ladder.py --verify mine --drafter mine
#   python -m programs.trace --use exercises/ladder.py --verify mine --drafter mine --max-new 20
#   python -m programs.bench --use exercises/ladder.py --verify mine --drafter mine --gamma 4
#
# "mine" names your rule and your draft model; the loop and the round are yours in any case.

if __name__ == "<run_path>":  # the name of a file that --use runs
    from exercises.stand_ins import plug_in
    print("your steps:", ", ".join(plug_in(globals())) or "none yet, all are the reference's")
