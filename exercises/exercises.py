"""Ten exercises. This is your file: write an answer in place of its `raise NotImplementedError`.

    python -m pytest exercises/test_exercises.py    grades what is answered; -rs lists what is not
    python -m pytest exercises -k ngram             grades one alone
    python specdec.py --use exercises/exercises.py --drafter ngram       writes a text with one

The last goes for python -m programs.trace and python -m programs.bench too; there are --verify
match, --drafter adaptive and --drafter ngram. Where a text must have the target's law, the check
computes its law exactly, over every way that the draws can fall: a rule that is nearly right fails.
The same tools are yours, from a Python prompt in the root:

    from exercises import *     # your answers; law, expectation; TARGET, DRAFT, two small models;
                                # and bias: how far texts are from their law

The letters p, q, x, gamma, k, n, alpha, c, v and V are explained at the top of sampling.py. Import
what you need from sampling, specdec, model, train_tiny and programs.bench. An answer takes 5 to 25
lines, and none needs another. Each comes with the seam that it goes into, what to write, what to
observe with it, and what to read (by their arXiv numbers; "Leviathan" is 2211.17192).
"""

import torch

from specdec import DraftModel
from variants import DRAFTERS, RULES


def verify_match(p, q, drafted, choose):
    """1. Sample and match: draw from the target as if there were no drafts, and keep those that
    happen to be the same.

    Seam: a rule, verify(p, q, drafted, choose) -> (n, token), two tensors of shape (), as
    verify_token in sampling.py. There may be no drafts: then p has one row.
    Write: draw a token from each of the k+1 rows of p. n counts the drafts that equal the draw of
    their own row, up to the first that does not; token is the draw of the row after them. q is not
    needed.
    Observe: the text has the target's law whatever the drafter does, for each token was drawn from
    p. But a draft stands with probability Σ p·q, and by the token rule with Σ min(p, q). Compare
    the drafts kept by --verify match and by --verify token, then with --drafter lookup, whose q is
    one-hot, and with --temperature 0. How much do the two sums differ where p = q?
    Read: 2305.09781 (SpecInfer, which calls this naive sampling).
    """
    raise NotImplementedError


def one_sided_top_p(p, q, top_p):
    """2. Top-p on one side only: drafts drawn from the filtered q, judged as if from the whole q.

    Seam: warp(logits, top_p=...), whose output is meant to be both what is drawn from and what is
    scored. Here a draft is drawn from warp(q.log(), top_p=top_p), while verify_token is given q.
    Write: for p and q of shape (V,) without zeros, which may be equal, return three things about
    the first token of a round with gamma 1: its law (V,); the total variation distance of that law
    from p, a float; and the set of ids that gain, being likelier than in p by more than 1e-9.
    Observe: call it with p = (.6, .3, .1), q = (.3, .5, .2) and a top_p of .3, .6 and 1. Do all
    tokens that the filter kept gain? Can one gain that it dropped? Then put the filtered q in both
    places: the law is p again, though q is narrower.
    Read: Leviathan, section 2.2 and appendix A.1: which line of the proof fails? 1904.09751.
    """
    raise NotImplementedError


def fit(rows):
    """3. From the figures of a few measured gammas: alpha, c, v, and the gamma to use.

    Seam: rows is a list of dicts as `measure` in programs/bench.py gives them, one a gamma. You
    need "passes", "drafted", "tested", "accepted", "tokens_per_pass" and "speedup".
    Write: return (alpha, c, v, gamma). alpha is accepted / tested, of all rows together. c and v
    are the line of least squares through all rows, each counting once: a round costs v + c ·
    (drafts a round) plain steps, and a row says what its rounds cost, since speedup = tokens a pass
    / cost of a round. Give c and v as the line has them, even below 0. gamma, from 1 to 20 with 20
    among them, is the one for which expected_tokens and expected_speedup in programs/bench.py
    promise most from these; but 0 where none is above 1, the speedup of plain decoding.
    Observe: run python -m programs.bench --json FILE, and give fit its "rows". Is the fastest gamma
    near yours? Then put accepted/drafted for alpha, and gamma for drafted/passes: what does each do
    to the answer?
    Read: Leviathan, equation 1, Theorem 3.8, Corollary 3.9, section 3.5.
    """
    raise NotImplementedError


def adaptive(propose):
    """4. A drafter that drafts more while its drafts stand, and less once they fall.

    Seam: a drafter, propose(tokens, gamma, choose) -> (drafted, q). It may draft fewer than gamma.
    Make this one from any other, for one text. It is not told the verdict, but it sees the text: by
    how much did that grow since the last call, and how many drafts were there?
    Write: draft 1 at first. After a round whose drafts all stood, draft one more than it had; after
    any other, one fewer than it had, but at least 1. (After a round without drafts both say 1.)
    What a round had is what the drafter inside gave, which can be fewer than it was asked for.
    Never ask it for more than gamma. Two texts may be written in turn, each with a drafter of its
    own. The list of tokens is the loop's, and grows: keep its length, not the list.
    Observe: compare the bench of --drafter adaptive --gamma 12 with that of --drafter model. The
    law is kept, since the length is settled before the tokens are drawn. Drop a draft AFTER seeing
    it, say where its q(x) is below .5, and it is lost: see bias(lambda: YOUR_DRAFTER). Yet to stop
    drafting after such a token is sound, as long as it is sent too. Why?
    Read: 2405.19715 (SpecDec++), 2405.04304.
    """
    raise NotImplementedError


def ngram(vocab_size, device, smoothing=0.1):
    """5. A drafter without a model, like prompt_lookup in variants.py, but with a whole
    distribution.

    Seam: propose(tokens, gamma, choose) -> drafted (gamma,) and q (gamma, V), both on the device,
    row i of q being exactly what draft i was drawn from. Return such a function. It is called once
    a round with the whole text, which has grown since. The list is the loop's own: do not write to
    it.
    Write: N(a, b) is how often b follows a in the text so far, without the drafts. After the token
    a, draw x from q(x) = (N(a, x) + smoothing) / Σ_b (N(a, b) + smoothing). The first draft follows
    the last token of the text, each other one the draft before it. gamma may be 0. q is float64.
    Observe: two mistakes leave the text fluent and its law wrong: to propose the likeliest token
    and report the soft q, and to draw from the soft q and report a one-hot row. What does
    bias(lambda: YOUR_DRAFTER) say of each, YOUR_DRAFTER being made for 2 tokens? Compare the drafts
    kept by --drafter ngram and --drafter lookup, at temperature 1 and 0. When is a soft q better
    than a one-hot one, Σ min(p, q) against p(x)?
    Read: 2404.08698, 2311.08252 (REST).
    """
    raise NotImplementedError


def shared_noise(propose, noise):
    """6. Speculation that changes nothing: the very text that plain decoding writes on the same
    noise.

    Seam: a drafter and a rule, made together: return (propose, verify), for one text. noise is
    (context + 1, V), independent exponential variables; row t belongs to position t of the text,
    where the prompt starts at position 0. The token drawn there from any distribution (V,) is
    (probs / noise[t]).argmax(-1), as in sampling.seeded.
    Write: a drafter that calls the one given once, with a choose of your own: DraftModel calls it
    once a draft, with (V,), and it takes the noise of the next position each time. Then a rule as
    in exercise 1, on the same noise. It has to know the length of the text, which only the drafter
    is told. There may be fewer drafts than gamma, or none. The loop's own choose is not used.
    Observe: on the same noise draft and target draw the same token with probability at least
    (1 - TV) / (1 + TV), against Σ p·q for independent draws. Take the mean, over 100 noises, of the
    passes that 12 tokens of TARGET need with DRAFT: with this, with exercise 1, and with the token
    rule. Then try another gamma on the same noise: does the text change?
    Read: 2408.07978.
    """
    raise NotImplementedError


def verify_two(p, q, drafted, choose):
    """7. Two candidates for the same position: where the first is rejected, the second has its
    chance.

    Seam: a rule for one position and two branches. drafted (2,) are independent draws from q (V,).
    p is (3, V): row 0 judges both; row 1 follows the first candidate, row 2 the second.
    Write: return (which, token) as ints. which is 1 or 2, the candidate that stands, and token the
    bonus drawn from row `which`; or which is 0 and token the correction. The token rule tests the
    first. Once it is rejected, what is left to cover is not p any more: by what distribution is the
    second judged, with a coin of its own, and what is the correction drawn from when both fail?
    `residual` in sampling.py is all it takes. Write into none of the arguments.
    Observe: with p = (.6, .3, .1) and q = (.3, .5, .2) one draft stands with probability .7. With
    which do two? `expectation` tells, of a program that draws both and calls your rule. And with
    q = p, and with a one-hot q? The loop in specdec.py feeds one run of tokens, and so has no row
    2: what would its cache, its attention and its token shift need for two branches in one pass?
    Read: 2305.09781 (SpecInfer), multi-step speculative sampling; 2310.15141 (SpecTr).
    """
    raise NotImplementedError


def early_exit(target, n_layer, windows):
    """8. The target as its own draft: its first layers, then a head of the draft's own.

    Seam: the model that DraftModel in specdec.py decodes with. Return a GPT whose embed, norm and
    first n_layer blocks ARE the target's, not copies, and whose unembed is its own. Its config
    names n_layer layers, since a cache is made by that. Its buffer is in the target's format, which
    in the check is float64: GPT(config).to(target.embed.weight).
    Write: start the head as a copy of the target's, and train it to say what the target says: 100
    steps of Adam with learning rate 0.01, each on all windows (B, T+1), as draw_windows in
    train_tiny.py cuts them and total_variation there reads them. In the check 1 - alpha falls to
    less than half. Leave the target as it was: its weights, its config, what of it can be trained,
    and no gradient on it (Tensor.backward takes inputs=).
    Observe: load_pair("checkpoints/tiny", dtype=torch.float32) has a target. Its corpus, for
    draw_windows, is the second value of prepare(read_documents(standard_library()), Recipe()), all
    of train_tiny.py. How much alpha does the head's training win, and how much one more layer? c is
    about n_layer / (layers of the target): which n_layer does expected_speedup like best? What
    could the draft's cache and the target's share?
    Read: 2404.16710 (LayerSkip), 2309.08168, 2404.18911 (Kangaroo).
    """
    raise NotImplementedError


def distill(p, contexts, loss):
    """9. Three losses for a draft that is too small to match its target: each gives up something
    else.

    Seam: the last stage of train_models in train_tiny.py, with the smallest pair there is. The
    target is a table, p (N, V), its distribution in each of N contexts. The draft is one matrix W
    (D, V): q = softmax(contexts @ W), with contexts (N, D) and D too small to reach p.
    Write: train W from zeros, 300 steps of Adam with learning rate 0.05, on the mean over contexts
    of the loss named: "forward KL", Σ p log(p/q); "reverse KL", Σ q log(q/p); or "total variation",
    1 - Σ min(p, q). With forward KL p may have zeros: such a token adds 0 to the loss. Return q
    (N, V) of the last W, detached.
    Observe: the third is the game of speculative decoding. Print the rows of the three q beside
    those of p: which loss spreads q over all that p does, and which gathers it on a few tokens?
    Give p a zero, as a top-k does: which loss is infinite? Then change the loss in train_tiny.py,
    and measure alpha.
    Read: 2310.08461 (DistillSpec); Leviathan, Corollary 3.6.
    """
    raise NotImplementedError


def speculative_batch(target, proposes, texts, max_new, gamma, warp, choose):
    """10. Several texts in one pass of the target a round, each keeping all that it accepted.

    Seam: the loop, `speculative` in specdec.py. texts is a list of lists of ids, of different
    lengths, and proposes has a drafter for each. Return the max_new new ids of each text, a list of
    lists, and leave texts as they are.
    Write: in a round, each unfinished text drafts as in the loop, at most one fewer than are left,
    for the target adds a token of its own, also where there are no drafts. All of them, each with
    its drafts, go through the target together, once, without a cache: target(ids), with ids (B, T)
    on target.device, gives logits (B, T, V). Fill up short rows on the right with any id of the
    vocabulary. Then verify_token judges each text on its own rows: the row at the place of its last
    token judges draft 0, and so on. A text that is complete takes no part any more.
    Observe: the batch is done when its slowest text is. To cut all to the fewest accepted is
    lossless too: count the passes for 1, 2, 4 and 8 texts of TARGET with DRAFT, both ways. Once B
    texts keep the processor busy, v is no longer near 1: who still gains?
    Read: 2404.15778 (BASS), 2310.18813.
    """
    raise NotImplementedError


if __name__ == "<run_path>":  # the name of a file that --use runs
    from exercises.grading import ready  # the answer, or one line that it is not written yet
    RULES["match"] = lambda *arguments: ready(verify_match)(*arguments)
    DRAFTERS["adaptive"] = lambda pair, warp: ready(adaptive)(DraftModel(pair.draft, warp))
    DRAFTERS["ngram"] = lambda pair, warp: ready(ngram)(pair.encoding.n_vocab, pair.target.device)
