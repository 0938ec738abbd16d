"""What each of the ten answers has to satisfy: one check for each, which is given the answer."""

import functools
import itertools
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from exact import distance
from exercises.grading import (DEVICE, Failure, Reader, case, check_drafts, check_law, is_tensor,
                               kind, law, numbers, on_copies, parts, random_table, require, same,
                               same_law, table, watched)
from exercises.ladder_checks import run_rule
from programs.bench import expected_speedup, expected_tokens
from rigs import autoregressive_law, greedy, random_gpt
from sampling import verify_token, warp
from specdec import DraftModel, plain, speculative
from train_tiny import total_variation

TARGET, DRAFT = Reader(1), Reader(2)
P, Q = table(0.6, 0.3, 0.1), table(0.3, 0.5, 0.2)
hot = functools.partial(warp, temperature=4)


def laws(drafter, verify=verify_token, new=3, most=2000):
    """(law, right law) of texts of the real loop. drafter() makes a drafter for one text."""
    def write(choose):
        rounds = speculative(TARGET, drafter(), [0, 1], new, gamma=2, warp=warp, choose=choose,
                             verify=verify)
        return tuple(token for one in rounds for token in one.new)

    return law(write, most), autoregressive_law(TARGET, [0, 1], new, warp)


def bias(drafter, verify=verify_token):
    """How far the law of the texts is from the target's own: the largest difference between the
    probabilities that a text has in the two. Below 1e-12 it is rounding: they are the same."""
    return distance(*laws(drafter, verify, most=20_000))


def check_text(drafter, new=3):
    check_law(*laws(drafter, new=new), "the text does not have the target's law: the text")


# ---------------------------------------------------------------- 1. sample and match

def check_verify_match(answer):
    """The rule is that of the exercise, not just any that is lossless; with no drafts, too."""
    p, q = torch.stack([P, Q, P.roll(1), P, Q]), torch.stack([Q, P, P, Q])
    for drafted in [*itertools.product(range(3), repeat=2), (), (1, 0, 2, 1)]:
        k = len(drafted)
        came = law(lambda choose: run_rule(answer, p[:k + 1], q[:k], drafted, choose))
        right = law(lambda choose: matches(choose(p[:k + 1]).tolist(), drafted))
        check_law(came, right, f"of the drafts {drafted} the (n, token)")


def matches(own, drafted):
    n = [own[i] == x for i, x in enumerate(drafted)] + [False]
    return n.index(False), own[n.index(False)]


# ---------------------------------------------------------------- 2. top-p on one side only

def check_one_sided_top_p(answer):
    """All that it returns is what the real rule does to a draft from the filtered q."""
    tables = (random_table(8, 5, seed=seed).softmax(-1) for seed in (1, 2))
    for (p, q), top_p in itertools.product([(P, Q), (P, P), *zip(*tables)], (0.3, 0.6, 1.0)):
        def first_token(choose):
            drafted = choose(warp(q.log()[None], top_p=top_p))
            n, token = verify_token(torch.stack([p, p]), q[None], drafted, choose)
            return (drafted if n else token).item()

        right = law(first_token)
        gain = [right[x] - p[x].item() for x in range(len(p))]
        with case(f"p = {numbers(p)}, q = {numbers(q)}, top_p = {top_p}"):
            came, variation, gainers = parts(answer(p, q, top_p), "law", "distance", "gainers")
            same_law("the law of the first token is", came, [right[x] for x in range(len(p))])
            require(isinstance(variation, float), f"the distance is {kind(variation)}, no float")
            same_law("the total variation distance is", [variation], [sum(map(abs, gain)) / 2])
            same("the set of those that gain", set(gainers), {x for x in right if gain[x] > 1e-9})


# ---------------------------------------------------------------- 3. from measurements to gamma

FITS = [  # alphas of the rows, c, v, and the gamma that suits
    ((0.8, 0.78, 0.74, 0.7), 0.1, 1.2, 5), ((0.7, 0.6, 0.62, 0.55), 0.15, 1.1, 3),
    ((0.95, 0.96, 0.97, 0.98), 0.01, 1.3, 20), ((0.3, 0.35, 0.25, 0.3), 0.4, 1.2, 0),
    ([0.8] * 4, 0.1, 2.0, 10), ([0.6] * 4, 0.2, 0.8, 2), ([0.8] * 4, -0.02, 1.5, 20),
    ([0.3] * 4, 0.3, 0.8, 1), ([0.3] * 4, 0.05, 1.5, 0), ([0.3] * 4, -0.05, 1.6, 20),
    ([1.0] * 4, 0.1, 1.2, 20)]


def check_fit(answer):
    """alpha from all counts, c and v of the line through all rows, gamma from 0 to 20."""
    for seed, (alphas, c, v, right_gamma) in enumerate(FITS):
        rows = measured(alphas, c, v, seed)
        alpha, c, v, gamma = parts(answer([dict(row) for row in rows]), "alpha", "c", "v", "gamma")
        right = sum(row["accepted"] for row in rows) / sum(row["tested"] for row in rows)
        require(abs(alpha - right) < 1e-6, f"alpha is {alpha:.4f}; right is {right:.4f}, of all "
                "drafts that were tested, in all rows together, the part that was accepted")
        check_line(rows, c, v)
        require(gamma == right_gamma, f"gamma is {gamma}; right is {right_gamma} for alpha "
                f"{alpha:.4f}, c {c:.4f} and v {v:.4f}: of 1 to 20 the one with the largest "
                "expected speedup, or 0 where none is above 1")


def measured(alphas, c, v, seed):
    """Rows of figures as a noisy machine gives them, with an alpha of its own for each gamma."""
    rows = []
    for gamma, alpha, noise in zip((1, 2, 4, 8), alphas, random_table(4, seed=seed).tolist()):
        passes = 4000 // (gamma + 1)
        drafts = 0.95 * gamma  # a round: the last one of a text is clipped
        accepted = round(passes * (expected_tokens(alpha, drafts) - 1))
        tokens, tested = 1 + accepted / passes, round(accepted / alpha)
        rows.append({"gamma": gamma, "passes": passes, "new_tokens": passes + accepted,
                     "drafted": round(passes * drafts), "tested": tested, "accepted": accepted,
                     "tokens_per_pass": tokens, "alpha": accepted / tested,
                     "speedup": expected_speedup(tokens, drafts, c, v) * (1 + 0.05 * noise)})
    return rows


def check_line(rows, c, v):
    """At the least sum of squares the errors are 0 on average, and do not go with the drafts."""
    drafts = table(*(row["drafted"] / row["passes"] for row in rows))
    costs = table(*(row["tokens_per_pass"] / row["speedup"] for row in rows))
    errors = costs - (v + c * drafts)
    require(max(abs(errors.sum()), abs((errors * drafts).sum())) < 1e-6, f"c = {c:.4f} and v = "
            f"{v:.4f} are not the line v + c · (drafts a round) with the least sum of squares: the "
            f"drafts a round are {numbers(drafts)}, and a round costs {numbers(costs)} plain "
            f"steps, where that line has {numbers(costs - errors)}")


# ---------------------------------------------------------------- 4. a draft length that adapts

# Rounds of a text: gamma asked for, drafts wanted if the answer is right, the most that the drafter
# inside gives, how many of the drafts stand.
ROUNDS = [(4, 1, 9, 1), (4, 2, 9, 2), (4, 3, 9, 1), (4, 2, 9, 2), (4, 3, 9, 3), (4, 4, 9, 4),
          (4, 4, 9, 4), (4, 4, 9, 4), (4, 4, 9, 3), (4, 3, 9, 3), (4, 4, 1, 1), (4, 2, 9, 0),
          (4, 1, 9, 0), (4, 1, 9, 0), (4, 1, 9, 1), (4, 2, 0, 0), (4, 1, 9, 1), (4, 2, 9, 2),
          (1, 1, 9, 1), (4, 2, 9, 2), (4, 3, 1, 0), (4, 1, 9, 1), (0, 0, 9, 0)]


def check_adaptive(answer):
    """The length follows the verdicts, of two texts at once too, and the law is the target's."""
    list(adaptive_rounds(answer, ROUNDS))
    list(adaptive_rounds(answer, [*((4, n, 9, n) for n in (1, 2, 3)), (4, 4, 0, 0), (4, 1, 9, 1)]))
    with case("two texts at once, a drafter for each"):
        list(zip(adaptive_rounds(answer, ROUNDS[:5]), adaptive_rounds(answer, [(4, 1, 9, 0)] * 5)))
    check_text(lambda: answer(DraftModel(DRAFT, warp)), new=4)


def adaptive_rounds(answer, rounds):
    """Yields after each round. A text starts with three tokens; a round adds n + 1."""
    asked, text, history = [], [0, 0, 0], "it is the first round"

    def inside(tokens, gamma, choose):
        asked.append(gamma)
        drafted, q = one_hot_drafts([1] * min(gamma, gives), 2)
        return drafted, 0.9 - 0.8 * q  # unlikely drafts: they are to be sent on all the same

    propose = answer(inside)
    for number, (gamma, wanted, gives, stand) in enumerate(rounds, 1):
        asked.clear()
        before = list(text)
        drafted, q = parts(propose(text, gamma, None), "drafted", "q")
        with case(f"round {number} of a text, gamma is {gamma} and {history}"):
            same("the caller's list of tokens", text, before)
            same("the number of drafts asked for", sum(asked), wanted)
            sent = len(drafted), len(q)
            same("the numbers of drafts and rows sent on", sent, (min(wanted, gives),) * 2, {
                str(sent): "a draft that is dropped once it was seen biases the law"})
        # The target's own token: where a draft was rejected it is another one than that.
        text += [1] * stand + [int(stand == len(drafted))]
        history = f"of the {len(drafted)} drafts before {stand} stood"
        yield


def one_hot_drafts(ids, vocab_size):
    drafted = torch.tensor(ids, dtype=torch.long, device=DEVICE)
    return drafted, F.one_hot(drafted, vocab_size).double()


# ---------------------------------------------------------------- 5. an n-gram drafter

def check_ngram(answer):
    """q is of the counts of the text so far, as that grows, and the drafts are drawn from it."""
    whole, propose = [2, 0, 1, 0, 0, 1, 1], answer(3, DEVICE, 0.5)
    for text in (whole[:1], whole[:2], whole[:4], whole):
        def run(choose, gamma=4):
            given = list(text)
            drafted, q = parts(propose(given, gamma, choose), "drafted", "q")
            same("the caller's list of tokens", given, text)
            is_tensor("drafted", drafted, (gamma,), torch.long)
            is_tensor("q", q, (gamma, 3), torch.float64)
            return drafted, q

        def right(drafts):
            last, pairs = (text + drafts)[-1], list(zip(text, text[1:]))
            counts = table(*(pairs.count((last, x)) + 0.5 for x in range(3)))
            return counts / counts.sum()

        with case(f"of the text {text}, with smoothing 0.5"):
            run(None, gamma=0)
            check_drafts(run, right)
    check_text(lambda: answer(2, DEVICE))


# ---------------------------------------------------------------- 6. shared noise

def check_shared_noise(answer):
    """On the same noise the text is that of plain decoding, to the end of the context, whatever the
    draft model and gamma; and a draft model that is the target never fails."""
    V, context, prompt, new = 6, 16, [3, 1, 4], 14
    target, draft = Reader(1, V), Reader(2, V)
    short = Reader(2, V, context=11)  # drafts fewer than asked, then none
    for seed in range(3):
        noise = torch.empty(context + 1, V, dtype=torch.float64)
        noise = noise.exponential_(generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        rows = iter(noise[len(prompt):])
        text = prompt + list(plain(target, prompt, new, warp=hot,
                                   choose=lambda p: (p / next(rows)).argmax(-1)))
        for model, gamma in [(draft, 1), (draft, 4), (short, 4), (target, 4)]:
            drafter = watched(DraftModel(model, hot), prompt, new)
            propose, verify = parts(answer(drafter, noise), "propose", "verify")
            rounds = speculative(target, propose, prompt, new, gamma=gamma, warp=hot,
                                 choose=not_used, verify=verify)
            passes = check_on_noise(rounds, noise, len(prompt), text)
            require(model is not target or passes == math.ceil(new / (gamma + 1)), "the target as "
                    "its own draft model had drafts rejected: on the same noise both draw the same")


def not_used(probs):
    raise Failure("the loop's own choose was used: all draws are to be taken from the noise")


def check_on_noise(rounds, noise, position, text):
    """The number of rounds, after a look at each as it comes."""
    for number, one in enumerate(rounds, 1):
        for i, x in enumerate(one.drafts, position):
            right = (one.q[i - position] / noise[i]).argmax().item()
            require(x == right, f"draft {i - position + 1} of round {number} is for position {i} "
                    f"of the text: the noise of that row draws {right} from its q, not {x}")
        right = text[position:position + len(one.new)]
        require(one.new == right, f"round {number}, which starts at position {position}, wrote "
                f"{one.new}, and plain decoding on the same noise writes {right}")
        position += len(one.new)
    return number


# ---------------------------------------------------------------- 7. two drafts for one position

def check_verify_two(answer):
    """Each of the two stands as often as the rule lets it, and the text has the target's law."""
    tables = (random_table(4, 3, seed=seed).softmax(-1) for seed in (5, 6))
    for p, q in [(P, Q), (P, P), (table(1, 0, 0), Q),
                 (table(0.5, 0.35, 0.15), table(0.2, 0.3, 0.5)),
                 (table(0.6, 0.25, 0.15), table(0.5, 0.2, 0.3)), *zip(*tables)]:
        with case(f"p = {numbers(p)}, q = {numbers(q)}"):
            check_two(answer, p, q)


def check_two(answer, p, q):
    after = torch.stack([P, Q, P.roll(1)])  # what comes next, by the token before it

    def write(choose):
        drafted = choose(torch.stack([q, q]))
        rows = torch.stack([p, *after[drafted]])
        which, token = parts(on_copies(answer, rows, q, drafted, choose), "which", "token")
        require(type(which) is int and type(token) is int, f"which is {kind(which)} and token "
                f"{kind(token)}; right are two ints")
        require(which in (0, 1, 2), f"which is {which}; right is 1 or 2 for the candidate that "
                "stands, and 0 for none")
        if which:
            return which, (drafted[which - 1].item(), token)
        return 0, (token, choose(after[token]).item())

    stands, texts, left = [0.0] * 3, {}, (p - q).clamp(min=0)
    for (which, text), weight in law(write).items():
        stands[which] += weight
        texts[text] = texts.get(text, 0) + weight
    first = 1 - left.sum().item()
    second = torch.minimum(left, q * (1 - first)).sum().item()
    right = [1 - first - second, first, second]
    same_law("none, candidate 1 and candidate 2 stand with the probabilities", stands, right, {
        "the two are counted from 1, and 0 is for none": right[1:] + right[:1]})
    check_law(texts, {(a, b): (p[a] * after[a, b]).item() for a in range(3) for b in range(3)},
              "the text does not have the target's law: the text")


# ---------------------------------------------------------------- 8. early exit

def check_early_exit(answer):
    """The target's own layers, a head that has learnt, and a target that is as it was before."""
    target, before = (random_gpt(6, n_layer=3, seed=2) for _ in range(2))
    target.norm.bias.requires_grad_(False)  # as somebody may have left it
    windows = (random_table(32, 9) * 1e6).long() % 6  # (B, T+1)
    draft = answer(target, 1, windows)
    same("the number of the draft's blocks", len(draft.blocks), 1)
    for part in ("embed", "norm", "blocks.0"):
        require(draft.get_submodule(part) is target.get_submodule(part),
                f"the draft's {part} must be the target's, the same object, not a copy")
    require(draft.unembed.weight is not target.unembed.weight,
            "the draft's head must be its own, not the target's")
    same("config of the draft, which a cache is made by,", draft.config,
         replace(before.config, n_layer=1))
    same("config of the target", target.config, before.config)
    for (name, weight), old in zip(target.named_parameters(), before.parameters()):
        require(torch.equal(weight, old), f"the target's weights {name} have moved")
        frozen = name == "norm.bias"
        require(weight.requires_grad != frozen, f"the target's weights {name} "
                + ("were frozen and are not" if frozen else "are left frozen"))
        require(weight.grad is None, f"a gradient is left on the target's weights {name}: whoever "
                "trains it next would add to that")
    check_head(draft, before, windows)


@torch.no_grad()
def check_head(draft, target, windows):
    p = target(windows[:, :-1]).softmax(-1)  # (B, T, V)
    came = total_variation(draft, windows, p).item()
    draft.unembed = target.unembed
    require(abs(came - 0.0718) < 1e-3, f"with its own head 1 - alpha is {came:.4f} on the windows; "
            f"right is .072, and {total_variation(draft, windows, p):.3f} it is with the target's. "
            "Was the head trained from a copy of that, for 100 steps of learning rate 0.01, to say "
            "what the target says at the same place of the text?")


# ---------------------------------------------------------------- 9. what to distil for

GAMES = {  # loss: what it is of p and q, and where 300 steps take it, for the draft trained for it
    "forward KL": (lambda p, q: (-torch.special.entr(p) - p * q.log()).sum(-1).mean().item(),
                   0.782012855),  # p may have zeros
    "reverse KL": (lambda p, q: (q * (q / p).log()).sum(-1).mean().item(), 1.153558003),
    "total variation": (lambda p, q: 1 - torch.minimum(p, q).sum(-1).mean().item(), 0.489393085)}


def check_distill(answer):
    """Each loss is the best at its own game, and is where 300 steps of Adam take it, from zeros."""
    p, contexts = (2 * random_table(32, 8)).softmax(-1), 0.05 * random_table(32, 3, seed=1)
    drafts = {loss: answer(p, contexts, loss) for loss in GAMES}
    for loss, q in drafts.items():
        with case(loss):
            is_tensor("q", q, tuple(p.shape), torch.float64)
            require(not q.requires_grad, "q must be detached")
            require((q.sum(-1) - 1).abs().max() < 1e-9, "q must have rows that sum to 1")
    for loss, (score, _) in GAMES.items():
        best = min(drafts, key=lambda name: score(p, drafts[name]))
        require(best == loss, f"the draft trained for {loss} has more of it than the one trained "
                f"for {best}: is its loss right?")
    for loss, (score, right) in GAMES.items():
        came = score(p, drafts[loss])
        require(abs(came - right) < 1e-6, f"the draft trained for {loss} reaches {came:.7f} of it "
                f"on average; right is {right:.7f}, where 300 steps of Adam take it from zeros, "
                "with learning rate 0.05")
    with case("forward KL, where p has zeros"):
        p = warp(p.log(), top_k=4)
        came = GAMES["forward KL"][0](p, answer(p, contexts, "forward KL"))
        require(abs(came - 0.980791282) < 1e-6, f"the draft reaches {came:.7f}; right is .9807913: "
                "such a token adds 0 to the loss and to its gradient, and q has no zero there")


# ---------------------------------------------------------------- 10. a batch of texts

def check_speculative_batch(answer):
    """At temperature 0 three texts are those of the loop; then the exact law of two, and of the
    number of passes, is that of two texts that know nothing of each other."""
    target = Reader(1, context=32)
    proposes = [[DraftModel(Reader(seed, context=32), greedy) for seed in (1, 2, 4)]
                for _ in range(2)]
    rest = [[0, 1], [0, 0, 1, 1], [1]], 9, 3, greedy, lambda probs: probs.argmax(-1)
    *texts, passes, rows = batch(answer, target, proposes[0], *rest)
    *right, right_passes, right_rows = one_by_one(target, proposes[1], *rest)
    same("at temperature 0 the new tokens of three texts", texts, right)
    require(passes == right_passes, f"three texts of 9 new tokens took {passes} passes of the "
            f"target; right is {right_passes}, one a round for all, each text keeping all that it "
            "accepted")
    require(rows == right_rows, f"these passes read {rows} rows of ids in all; right is "
            f"{right_rows}: a text that is complete takes no part any more")
    came = batch(answer, target, two_drafters(), [[0, 1], [1]], 0, *rest[2:])
    same("with max_new 0 (the new tokens of two texts, passes of the target, rows read)", came,
         ((), (), 0, 0))
    two = [[0, 1], [1]], 3, 2, functools.partial(warp, temperature=1.5)
    check_law(law(lambda choose: batch(answer, TARGET, two_drafters(), *two, choose)),
              law(lambda choose: one_by_one(TARGET, two_drafters(), *two, choose)),
              "two texts in a batch: the (first, second, passes of the target, rows of ids read)")


def two_drafters():
    return [DraftModel(DRAFT, warp), DraftModel(DRAFT, greedy)]


def batch(answer, target, proposes, texts, new, gamma, warp, choose):
    """What the answer writes, how many passes it needs, and how many rows of ids these read."""
    proposes = [watched(propose, text, new) for propose, text in zip(proposes, texts)]
    given = [list(text) for text in texts]
    target.passes.clear()
    written = answer(target, proposes, given, new, gamma, warp, choose)
    require(given == texts, "the texts that were given have been changed")
    require(isinstance(written, list) and len(written) == len(texts),
            f"it returns {kind(written)}; right is a list of new ids for each text")
    return (*(tuple(map(int, text)) for text in written), len(target.passes),
            sum(len(rows) for _, *rows in target.passes))


def one_by_one(target, proposes, texts, new, gamma, warp, choose):
    """The same from the loop, text by text: the batch is done when its slowest text is."""
    rounds = [list(speculative(target, propose, text, new, gamma=gamma, warp=warp, choose=choose))
              for propose, text in zip(proposes, texts)]
    written = [tuple(token for one in of_text for token in one.new) for of_text in rounds]
    return (*written, max(map(len, rounds)), sum(map(len, rounds)))


CHECKS = {
    "verify_match": check_verify_match, "one_sided_top_p": check_one_sided_top_p, "fit": check_fit,
    "adaptive": check_adaptive, "ngram": check_ngram, "shared_noise": check_shared_noise,
    "verify_two": check_verify_two, "early_exit": check_early_exit, "distill": check_distill,
    "speculative_batch": check_speculative_batch,
}
