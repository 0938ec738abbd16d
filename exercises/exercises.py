"""Ten exercises. This is your file: write each answer in place of its `raise NotImplementedError`.

    python -m pytest exercises              grades what is answered; -rs lists what is not
    python -m pytest exercises -k ngram     grades one alone
    python exercises/exercises.py           writes a text as specdec.py does, with your answers:
                                            --verify match, --drafter adaptive, --drafter ngram

Where a text must have the target's law, the check computes its law exactly, over every way that the
draws can fall, so a rule that is nearly right fails. The same tools are yours to work with, from a
Python prompt in this folder or from a file of your own beside this one:

    from exercises import *
    from exact import expectation, law      # the exact mean and law of a program that draws
    from checks import DRAFT, TARGET, bias  # two small models; how far texts are from their law

The letters p, q, x, gamma, alpha, c, v and V are explained at the top of sampling.py. Import what
you need from sampling, specdec, bench, model and train_tiny. An answer takes 5 to 25 lines, and
none needs another.
"""

import sys
from pathlib import Path

import torch

root = Path(__file__).resolve().parent.parent
sys.path += [str(root), str(root / "tests")]

import specdec
from sampling import VERIFY, Verdict
from specdec import DRAFTERS, DraftModel


# ---------------------------------------------------------------- 1. sample and match

def verify_match(p, q, drafted, choose):
    """Draw from the target as if there were no drafts, and keep those that happen to be the same.

    Seam     verify(p, q, drafted, choose) -> Verdict(n, token), two tensors of shape (), as
             verify_token in sampling.py. There may be no drafts: then p has one row.
    Write    Draw a token from each of the γ+1 rows of p. n counts the drafts that equal the draw
             of their own row, up to the first that does not; token is the draw of the row after
             them. q is not needed.
    Observe  The text has the target's law whatever the drafter does: each token of it was drawn
             from p. But a draft stands with probability Σ p·q, and by the token rule with Σ min(p,
             q). Compare accepted/tested of `python exercises/exercises.py --verify match` with
             that of `--verify token`, then both with `--drafter lookup`, whose q is one-hot, and
             both with `--temperature 0`. Where do the two sums differ, and how much where p = q?
    Read     Miao et al. 2023 (SpecInfer, arXiv 2305.09781), who call this naive sampling;
             Leviathan et al. 2023 (arXiv 2211.17192), Algorithm 1, for the rule that keeps more.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 2. top-p on one side only

def one_sided_top_p(p, q, top_p):
    """The bias of a common fault: drafts drawn from the filtered q, judged as if from the whole q.

    Seam     warp(logits, top_p=...): its output is meant to be both what is drawn from and what is
             scored. Here a draft is drawn from warp(q.log(), top_p=top_p), while verify_token is
             given q itself.
    Write    For p and q of shape (V,) without zeros, return three things about the first token of
             a round with gamma 1: its law (V,); the total variation distance of that law from p, a
             float; and the set of ids that gain, being likelier than in p by more than 1e-9, which
             leaves rounding out.
    Observe  Call it with p = (.6, .3, .1), q = (.3, .5, .2) and a top_p of .3, .6 and 1. Do all
             tokens that the filter kept gain? Can one gain that it dropped? Then put the filtered
             q in both places: the law is p again, though q is narrower. Any q will do, if it is
             the one that was drawn from.
    Read     Leviathan et al. 2023 (arXiv 2211.17192), section 2.2 and appendix A.1: which line of
             the proof fails? Holtzman et al. 2020 (arXiv 1904.09751) for top-p itself.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 3. from measurements to gamma

def fit(rows):
    """From the figures of a few measured gammas: alpha, c, v, and the gamma to use.

    Seam     rows is a list of dicts as `measure` in bench.py gives them, one for each gamma. You
             need the counts "passes", "drafted", "tested" and "accepted", and "tokens_per_pass"
             and "speedup". Each is measured, so it has noise.
    Write    Return (alpha, c, v, gamma). alpha is accepted / tested, of all rows together. c and v
             are the line of least squares through all rows, each counting once: a round costs v +
             c · (drafts a round) plain steps, and a row says what its rounds cost, since speedup =
             tokens a pass / cost of a round. gamma, from 1 to 20 with 20 among them, is the one
             for which expected_tokens and expected_speedup in bench.py promise most from this
             alpha, c and v; but 0 where none is above 1, the speedup of plain decoding.
    Observe  Fit your own machine: run `python bench.py --json FILE`, and give fit those of its
             "rows" that have one drafter, rule and temperature. Is the gamma that was fastest near
             yours? Then put accepted/drafted for alpha, and gamma for drafted/passes: what does
             each do to the answer?
    Read     Leviathan et al. 2023 (arXiv 2211.17192), equation 1, Theorem 3.8, Corollary 3.9,
             section 3.5.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 4. a draft length that adapts

def adaptive(propose):
    """A drafter that drafts more while its drafts stand, and less once they fall.

    Seam     propose(tokens, gamma, choose) -> (drafted, q). A drafter may draft fewer than gamma.
             Make this one from any other, for one text. It is not told the verdict, but it sees
             the text: by how much did that grow since the last call, and how many drafts were
             there?
    Write    Draft 1 at first. After a round whose drafts all stood, draft one more than it had;
             after any other, one fewer than it had, but at least 1. What a round had is what the
             drafter inside gave, which can be fewer than it was asked for. Never ask it for more
             than gamma. Two texts may be written in turn, each with a drafter made for it.
    Observe  Compare drafted and accepted of
             `python exercises/exercises.py --drafter adaptive --gamma 12 --json FILE` with those
             of `--drafter model`. The text keeps the target's law, since the length is settled
             before the tokens are drawn. Drop a draft AFTER seeing it, say where its q(x) is below
             .5, and the law is lost, though every token was judged by the right rule: see
             bias(lambda: YOUR_DRAFTER). Yet to stop drafting after such a token is sound, as long
             as it is sent too. Try that as well. Why?
    Read     Huang et al. 2024 (SpecDec++, arXiv 2405.19715); Mamou et al. 2024 (arXiv 2405.04304).
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 5. an n-gram drafter

def ngram(vocab_size, device, smoothing=0.1):
    """A drafter without a model, like prompt_lookup in specdec.py, but with a whole distribution.

    Seam     propose(tokens, gamma, choose) -> drafted (γ,) and q (γ, V), both on the device, row i
             of q being exactly what draft i was drawn from. Return such a function. It is called
             once a round, each time with the whole text, which has grown since.
    Write    N(a, b) is how often b follows a in tokens, the text so far without the drafts. After
             the token a, draw x from q(x) = (N(a, x) + smoothing) / Σ_b (N(a, b) + smoothing). The
             first draft follows the last token of the text, each other one the draft before it.
             gamma may be 0. q is float64.
    Observe  Two mistakes leave the text fluent and its law wrong: to propose the likeliest token
             and report the soft q, and to draw from the soft q and report a one-hot row. What does
             bias(lambda: YOUR_DRAFTER) say of each, YOUR_DRAFTER being made for 2 tokens? Compare
             accepted/tested of `python exercises/exercises.py --drafter ngram` with that of
             `--drafter lookup`, at temperature 1 and 0. When is a soft q better than a one-hot
             one, Σ min(p, q) against p(x)?
    Read     Ou et al. 2024 (arXiv 2404.08698); He et al. 2023 (REST, arXiv 2311.08252), who look
             up a large store.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 6. shared noise

def shared_noise(propose, noise):
    """Speculation that changes nothing: the very text that plain decoding writes on the same noise.

    Seam     propose and verify, made together: return (propose, verify), for one text. noise is
             (context + 1, V), independent exponential variables; row t belongs to position t of
             the text, where the prompt starts at position 0. The token drawn there from any
             distribution is (probs / noise[t]).argmax(-1), as in sampling.seeded. The last token
             that a context has room for is never fed, so a text has context + 1 positions.
    Write    A propose that calls the one given with a choose that takes the noise of the right
             positions, one draft a call as DraftModel does; and a verify as in exercise 1, on the
             same noise. It has to know the length of the text, which only propose is told. The
             drafts may be fewer than gamma. The loop's own choose is not used at all.
    Observe  On the same noise draft and target often draw the same token: with probability at
             least (1 - TV) / (1 + TV), against Σ p·q for independent draws. Take the mean, over
             100 noises, of the passes that 12 tokens of TARGET need with DRAFT: with this, with
             exercise 1, and with the token rule. Then try another gamma on the same noise: does
             the text change?
    Read     Daliri, Musco and Suresh 2024 (arXiv 2408.07978).
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 7. two drafts for one position

def verify_two(p, q, drafted, choose):
    """Two candidates for the same position: where the first is rejected, the second has its chance.

    Seam     verify, for one position and two branches. drafted (2,) are independent draws from q
             (V,). p is (3, V): row 0 judges both; row 1 follows the first candidate, row 2 the
             second.
    Write    Return (which, token) as ints. which is 1 or 2, the candidate that stands, and token
             the bonus drawn from row `which`; or which is 0 and token the correction. The token
             rule tests the first. Once it is rejected, what is left to cover is not p any more: by
             what distribution is the second judged, and what is the correction drawn from when
             both fail? `residual` in sampling.py is all it takes.
    Observe  With p = (.6, .3, .1) and q = (.3, .5, .2) one draft stands with probability .7. With
             which do two? `expectation` tells, of a program that draws both and calls your rule.
             And with q = p, and with a one-hot q? The loop in specdec.py feeds one run of tokens,
             and so has no row 2: what would its cache and its attention need for two branches in
             one pass?
    Read     Miao et al. 2023 (SpecInfer, arXiv 2305.09781), multi-step speculative sampling; Sun
             et al. 2023 (SpecTr, arXiv 2310.15141), for the best that any rule can do.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 8. early exit

def early_exit(target, n_layer, windows):
    """The target as its own draft: its first layers, then a head of the draft's own.

    Seam     the model that DraftModel in specdec.py decodes with. Return a GPT whose embed and
             first n_layer blocks ARE the target's, not copies of them, and whose unembed is its
             own. Its config names n_layer layers, since a cache is made by that.
    Write    Start the head as a copy of the target's, and train it to say what the target says:
             100 steps of Adam with learning rate 0.01, each on all windows (B, T+1), as
             draw_windows in train_tiny.py cuts them and total_variation there reads them. 1 -
             alpha on the windows has to fall to less than half of what it is with the target's own
             head. Train the head and nothing else: leave the target as it was, its weights, its
             config and what of it can be trained.
    Observe  pair = load_pair("../checkpoints/tiny", dtype=torch.float32) has a target, and its
             corpus for draw_windows. How much alpha does the head's training win, and how much one
             more layer? c is about n_layer / (layers of the target). Which n_layer does
             expected_speedup like best? The draft keeps a cache of its own, and the verification
             computes its layers once more: what could the two share?
    Read     Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710); Zhang et al. 2023 (arXiv
             2309.08168), who skip layers; Liu et al. 2024 (Kangaroo, arXiv 2404.18911), who add a
             small adapter.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 9. what to distil for

def distill(p, contexts, loss):
    """Three losses for a draft that is too small to match its target: each gives up something else.

    Seam     the last stage of train_pair in train_tiny.py, with the smallest pair there is. The
             target is a table, p (N, V), its distribution in each of N contexts. The draft is one
             matrix W (D, V): q = softmax(contexts @ W), with contexts (N, D) and D too small to
             reach p.
    Write    Train W from zeros, 300 steps of Adam with learning rate 0.05, on the mean over
             contexts of the loss named: "forward KL", Σ p log(p/q); "reverse KL", Σ q log(q/p); or
             "total variation", 1 - Σ min(p, q). Return q (N, V), detached.
    Observe  Each wins its own game, and the third is the game of speculative decoding. Print the
             rows of the three q beside those of p, for a p that is far from even: which loss
             spreads q over all that p does, and which gathers it on a few tokens? Give p a zero,
             as a top-k does: which loss is infinite? Then change the loss in train_tiny.py, and
             measure alpha.
    Read     Zhou et al. 2023 (DistillSpec, arXiv 2310.08461); Leviathan et al. 2023 (arXiv
             2211.17192), Corollary 3.6.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 10. a batch of texts

def speculative_batch(target, proposes, texts, max_new, gamma, warp, choose):
    """Several texts in one pass of the target a round, each keeping all that it accepted.

    Seam     the loop, `speculative` in specdec.py. texts is a list of lists of ids, of different
             lengths, and proposes has a drafter for each. Return the max_new new ids of each text,
             a list of lists, and leave texts as they are.
    Write    In a round, each unfinished text drafts as in the loop, never past its end: the target
             adds a token of its own, so at most one fewer than are left. All of them, each with
             its drafts, go through the target together, once; then verify_token judges each on its
             own rows. Do without a cache, since the one in model.py holds one text: target(ids),
             with ids (B, T) on target.device, gives logits (B, T, V). Fill up short rows on the
             right, where no earlier token looks. A text that is complete takes no part any more.
    Observe  The texts advance by different amounts, and the batch is done when its slowest text
             is. To cut all to the fewest accepted is lossless too: count the passes for 1, 2, 4
             and 8 texts of TARGET with DRAFT, both ways. A cache for this needs a length for each
             text. And once B texts keep the processor busy, v is no longer near 1: who still
             gains?
    Read     Qian et al. 2024 (BASS, arXiv 2404.15778); Su et al. 2023 (arXiv 2310.18813), batch
             size against gamma.
    """
    raise NotImplementedError


if __name__ == "__main__":
    VERIFY["match"] = verify_match
    DRAFTERS["adaptive"] = lambda pair, warp: adaptive(DraftModel(pair.draft, warp))
    DRAFTERS["ngram"] = lambda pair, warp: ngram(pair.encoding.n_vocab, pair.target.device)
    specdec.main()
