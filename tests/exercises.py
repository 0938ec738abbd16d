"""Ten exercises. This is your file: write each answer in place of its `raise NotImplementedError`.

    python -m pytest tests/test_exercises.py -rs        grades what is answered, lists what is not

An exercise that still raises NotImplementedError is skipped; -k test_4 grades the fourth alone. Where a text must
have the target's law, the check computes its law exactly, over every way that the draws can fall, so a rule that
is nearly right fails. That helper, tests/exact.py, is yours to use while you work.

The letters p, q, x, gamma, alpha, c, v and V are explained at the top of sampling.py. Import what you need from
sampling, specdec, model and train_tiny. An answer takes 5 to 25 lines, and none needs another.
"""


# ---------------------------------------------------------------- 1. sample and match

def verify_match(p, q, drafted, choose):
    """Draw from the target as if there were no drafts, and keep those that happen to be the same tokens.

    Seam     verify(p, q, drafted, choose) -> (n, token), both tensors of shape (): see verify_token in sampling.py.
    Write    Draw a token from each of the γ+1 rows of p. n counts the drafts that equal the draw of their own
             row, up to the first that does not; token is the draw of the row after them. q is not needed.
    Observe  The text has the target's law whatever the drafter does: each token of it was drawn from p. But a
             draft stands with probability Σ p·q, where the token rule reaches Σ min(p, q). How far apart are
             the two where p = q? Where q is one-hot? At temperature 0?
    Read     Miao et al. 2023 (SpecInfer, arXiv 2305.09781), who call this naive sampling; Leviathan et al. 2023
             (arXiv 2211.17192), Algorithm 1, for the rule that keeps more.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 2. top-p on one side only

def one_sided_top_p(p, q, top_p):
    """The bias of a common fault: drafts drawn from the filtered q, and judged as if drawn from the whole q.

    Seam     warp(logits, top_p=...): its output is meant to be both what is drawn from and what is scored. Here
             a draft is drawn from warp(q.log(), top_p=top_p), while verify_token is given q itself.
    Write    For p and q of shape (V,) without zeros, return three things about the first token of a round with
             gamma 1: its law (V,); the total variation distance of that law from p, a float; and the set of
             ids that gain, being likelier than in p by more than 1e-9, which is rounding.
    Observe  Filter q for drawing and for scoring, and the law is p again, though q is narrower now: any q will
             do that is really the one drawn from. Do all tokens that the filter kept gain? Can one gain that
             it dropped?
    Read     Leviathan et al. 2023 (arXiv 2211.17192), section 2.2 and appendix A.1: which line of the proof fails?
             Holtzman et al. 2020 (arXiv 1904.09751) for top-p itself.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 3. from measurements to gamma

def fit(rows):
    """From the figures of a few measured gammas: alpha, c, v, and the gamma to use.

    Seam     rows is a list of dicts as `measure` in specdec.py gives them, one for each gamma measured. You need
             the counts "passes", "drafted", "tested" and "accepted", and "tokens_per_pass" and "speedup".
    Write    Return (alpha, c, v, gamma). alpha from the counts of all rows. c and v by least squares: a round
             costs v + c · (drafts a round) plain steps, and each row says what its rounds cost, since
             speedup = tokens a pass / cost of a pass. gamma, from 1 to 20, is the one with the largest
             expected_speedup; but 0 where none beats plain decoding, whose speedup is 1.
    Observe  Why accepted/tested, and not accepted/drafted? Why drafted/passes, and not gamma? Fit the figures of
             your own machine (python specdec.py --bench --json FILE): is the gamma that was fastest near yours,
             and is v really the same for every gamma?
    Read     Leviathan et al. 2023 (arXiv 2211.17192), equation 1, Theorem 3.8, Corollary 3.9, section 3.5.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 4. a draft length that adapts

def adaptive(propose):
    """A drafter that drafts more while its drafts stand, and less once they fall.

    Seam     propose(tokens, gamma, choose) -> (drafted, q). A drafter may draft fewer than gamma. Make this one
             from any other, for one text. It is not told the verdict, but it sees the text: by how much did
             that grow since the last call, and how many drafts were there?
    Write    Draft 1 at first. After a round whose drafts all stood, draft one more than it had; after any other,
             one fewer than it had, but at least 1. Never draft more than the gamma asked for.
    Observe  The text keeps the target's law, because the length is settled before the tokens are drawn. Drop a
             draft AFTER seeing it, say for its small q(x), and the law is lost, though every token was judged
             by the right rule: the check shows it. Yet to stop drafting after one that looks bad is sound, as
             long as that one is sent too. Why?
    Read     Huang et al. 2024 (SpecDec++, arXiv 2405.19715); Mamou et al. 2024 (arXiv 2405.04304).
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 5. an n-gram drafter

def ngram(vocab_size, device, smoothing=0.1):
    """A drafter without a model, as prompt_lookup in specdec.py is, but with a whole distribution to offer.

    Seam     propose(tokens, gamma, choose) -> drafted (γ,) and q (γ, V), both on the device, row i of q being
             exactly what draft i was drawn from. Return such a function.
    Write    N(a, b) is how often b follows a in tokens, the text so far without the drafts. After the token a,
             draw x from q(x) = (N(a, x) + smoothing) / Σ_b (N(a, b) + smoothing). The first draft follows the
             last token of the text, each other one the draft before it. gamma may be 0. q is float64.
    Observe  Two mistakes leave the text fluent and its law wrong: to propose the likeliest token and report the
             soft q, and to draw from the soft q and report a one-hot row. In which texts does a soft q have
             more drafts accepted than a one-hot q, Σ min(p, q) against p(x)? And at temperature 0?
    Read     Ou et al. 2024 (arXiv 2404.08698); He et al. 2023 (REST, arXiv 2311.08252), who look up a large store.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 6. shared noise

def shared_noise(propose, noise):
    """Speculation that changes nothing: the very text that plain decoding writes on the same noise.

    Seam     propose and verify, made together: return (propose, verify), for one text. noise is (context, V),
             independent exponential variables; row t belongs to position t of the text, prompt included. The
             token drawn there from any distribution is (probs / noise[t]).argmax(-1), as in sampling.chooser.
    Write    A propose that calls the one given with a choose that takes the noise of the right positions, one
             draft a call as in draft_model; and a verify as in exercise 1, on the same noise. It has to know
             the length of the text, which only propose is told. The loop's own choose is not used at all.
    Observe  On the same noise draft and target often draw the same token: with probability at least
             (1 - TV) / (1 + TV), against Σ p·q for independent draws. The text depends neither on the draft
             model nor on gamma, as in greedy decoding. What does the token rule still have over this?
    Read     Daliri, Musco and Suresh 2024 (arXiv 2408.07978).
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 7. two drafts for one position

def verify_two(p, q, drafted, choose):
    """Two candidates for the same position: where the first is rejected, the second has its chance.

    Seam     verify, for one position and two branches. drafted (2,) are independent draws from q (V,). p is
             (3, V): row 0 judges both; row 1 follows the first candidate, row 2 the second.
    Write    Return (which, token) as ints. which is 1 or 2, the candidate that stands, and token the bonus drawn
             from row `which`; or which is 0 and token the correction. The token rule tests the first. Once it
             is rejected, what is left to cover is not p any more: by what is the second judged, and what is
             the correction drawn from when both fail? `residual` in sampling.py is all it takes.
    Observe  With p = (.6, .3, .1) and q = (.3, .5, .2) one draft stands with probability .7. With which do two?
             The loop in specdec.py feeds one run of tokens, and so has no row 2: what would its cache and its
             attention need to serve two branches in one pass?
    Read     Miao et al. 2023 (SpecInfer, arXiv 2305.09781), multi-step speculative sampling; Sun et al. 2023
             (SpecTr, arXiv 2310.15141), for the best that any rule can do.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 8. early exit

def early_exit(target, n_layer, windows):
    """The target as its own draft: its first layers, then a head of the draft's own.

    Seam     the model that draft_model in specdec.py decodes with. Return a GPT whose embed and first n_layer
             blocks ARE the target's, not copies of them, and whose unembed is its own.
    Write    Start the head as a copy of the target's and train it on windows (B, T) of token ids, until alpha
             there is higher than with the target's own head. A hundred steps of Adam do. Train the head and
             nothing else: the other weights are the target's, and must not move.
    Observe  The draft costs one head of memory, and c is about n_layer / (layers of the target). How much alpha
             does the head's training win, and how much one more layer? The draft keeps a cache of its own, and
             the verification computes its layers once more: what could the two share?
    Read     Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710); Zhang et al. 2023 (arXiv 2309.08168), who skip layers;
             Liu et al. 2024 (Kangaroo, arXiv 2404.18911), who add a small adapter.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 9. what to distil for

def distill(p, contexts, loss):
    """Three losses for a draft that is too small to match its target: each gives up something else.

    Seam     the last phase of train_pair in train_tiny.py, with the smallest pair there is. The target is a table,
             p (N, V), its distribution in each of N contexts. The draft is one matrix W (D, V):
             q = softmax(contexts @ W), with contexts (N, D) and D too small to reach p.
    Write    Train W from zeros, 300 steps of Adam with learning rate 0.05, on the mean over contexts of the loss
             named: "forward KL", Σ p log(p/q); "reverse KL", Σ q log(q/p); or "total variation",
             1 - Σ min(p, q). Return q (N, V), detached.
    Observe  Each wins its own game, and the third is the game of speculative decoding. Look at single rows: which
             loss spreads q over all that p does, and which gathers it on a few tokens? Which is infinite once
             a top-k has put zeros in p? Then change the loss in train_tiny.py, and measure alpha.
    Read     Zhou et al. 2023 (DistillSpec, arXiv 2310.08461); Leviathan et al. 2023 (arXiv 2211.17192), Corollary 3.6.
    """
    raise NotImplementedError


# ---------------------------------------------------------------- 10. a batch of texts

def speculative_batch(target, proposes, texts, max_new, gamma, warp, choose):
    """Several texts in one pass of the target a round, each keeping as many drafts as it has earned.

    Seam     the loop, `speculative` in specdec.py. texts is a list of lists of ids, of different lengths, and
             proposes has a drafter for each. Return the max_new new ids of each text, a list of lists.
    Write    In a round, each unfinished text drafts as in the loop; all of them, each with its drafts, go through
             the target together, once; then verify_token judges each on its own rows. Do without a cache, since
             the one in model.py holds one text: target(ids), ids (B, T). Fill up short rows on the right, where
             no earlier token looks.
    Observe  The texts advance by different amounts, and the batch is done when its slowest text is. To cut all to
             the fewest accepted is lossless too: what does it cost as B grows? A cache for this needs a length
             for each text. And once B texts keep the processor busy, v is no longer near 1: who still gains?
    Read     Qian et al. 2024 (BASS, arXiv 2404.15778); Su et al. 2023 (arXiv 2310.18813), batch size against gamma.
    """
    raise NotImplementedError
