"""What each answer has to satisfy: one check for each exercise, which is given the answer.

Where a text must have the target's law, its law is computed exactly, over every way that the draws
can fall, so a rule that is nearly right fails. A failure says in words what is wrong. `bias`,
below, is yours to use as well: how far the texts of any drafter and rule are from the target's law.
"""

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import replace

import torch
import torch.nn.functional as F

from bench import expected_speedup, expected_tokens
from exact import distance, every_outcome
from rigs import DEVICE, autoregressive_law, random_gpt
from sampling import verify_token, warp
from specdec import DraftModel, plain, speculative
from train_tiny import total_variation

EXACT = 1e-12  # rounding in float64 stays far below
TARGET, DRAFT = random_gpt(2, n_layer=2, seed=1), random_gpt(2, seed=2)
greedy = functools.partial(warp, temperature=0)
hot = functools.partial(warp, temperature=4)


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64, device=DEVICE)


P, Q = table(0.6, 0.3, 0.1), table(0.3, 0.5, 0.2)


def random_table(*shape, seed=0):
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)


# ---------------------------------------------------------------- exact laws of what may be wrong

def outcomes(program, most):
    """every_outcome of a program that may be wrong: it fails where a right one would have ended."""
    def program_that_ends(choose):
        draws = itertools.count(1)

        def counted(probs):
            assert next(draws) <= 200, "more than 200 draws in one run: does its loop end?"
            return choose(probs)

        return program(counted)

    for number, outcome in enumerate(every_outcome(program_that_ends), 1):
        assert number <= most, (
            f"more than {most} ways that the draws can fall, and a right answer has fewer: it "
            "draws what is not needed, such as drafts past the end of the text")
        yield outcome


def law(program, most):
    """{result: probability} over every outcome."""
    total = defaultdict(float)
    for weight, result in outcomes(program, most):
        total[result] += weight
    assert abs(sum(total.values()) - 1) < EXACT, (
        f"all ways that the draws can fall have the probability {sum(total.values()):.6f}, not 1: "
        "`choose` was given weights that do not sum to 1")
    return total


def check_law(written, right, what):
    """what: the words before a result and its probability."""
    __tracebackhide__ = True  # pytest shows the caller and the words, not the laws
    if distance(written, right) >= EXACT:
        worst = max(written.keys() | right.keys(),
                    key=lambda result: abs(written.get(result, 0) - right.get(result, 0)))
        raise AssertionError(f"{what} {worst} has the probability {written.get(worst, 0):.6f}, and "
                             f"{right.get(worst, 0):.6f} is right")


def laws(drafter, verify=verify_token, new=3, most=200):
    """(law, right law) of texts of the real loop. drafter() makes a drafter for one text."""
    def write(choose):
        rounds = speculative(TARGET, drafter(), [0, 1], new, 2, warp, choose, verify)
        return tuple(token for one in rounds for token in one.new)

    return law(write, most), autoregressive_law(TARGET, [0, 1], new, warp)


def bias(drafter, verify=verify_token):
    """How far the law of the texts is from the target's own: the largest difference between the
    probabilities that a text has in the two. Below 1e-12 it is rounding: they are the same."""
    return distance(*laws(drafter, verify, most=20_000))


def check_text(drafter, verify=verify_token, new=3):
    check_law(*laws(drafter, verify, new), "the text does not have the target's law: the text")


def model_drafter():
    return DraftModel(DRAFT, warp)


# ---------------------------------------------------------------- 1 to 3: a rule, a fault, speed

def check_verify_match(answer):
    """The text has the target's law, and a draft stands with probability p(x): the rule is that of
    the exercise, not just any that is lossless."""
    check_text(model_drafter, answer, new=2)
    p, q = torch.stack([P, Q, P.roll(1)]), torch.stack([Q, P])
    for gamma in (0, 2):  # the last round of a text may have no drafts
        for drafted in itertools.product(range(3), repeat=gamma):
            def rule(choose):
                ids = torch.tensor(drafted, dtype=torch.long, device=DEVICE)
                verdict = answer(p[:gamma + 1], q[:gamma], ids, choose)
                assert verdict.n.shape == verdict.token.shape == (), (
                    f"n and token must be tensors of shape (), not {tuple(verdict.n.shape)} and "
                    f"{tuple(verdict.token.shape)}")
                return int(verdict.n), int(verdict.token)

            check_law(law(rule, 27), law_of_matches(p, drafted),
                      f"of the drafts {drafted}, (how many stand, the token after them) =")


def law_of_matches(p, drafted):
    """{(n, token): probability}, where row i of p draws what draft i has to be."""
    right, stand = {}, 1.0
    for n, x in enumerate([*drafted, None]):  # no draft has the bonus's place
        right |= {(n, token): stand * p[n, token].item() for token in range(3) if token != x}
        if x is not None:
            stand *= p[n, x].item()
    return right


def check_one_sided_top_p(answer):
    """All that it returns is what the real rule does to a draft from the filtered q."""
    p, q = (random_table(8, 5, seed=seed).softmax(-1) for seed in (1, 2))
    for p, q in [(P, Q), *zip(p, q)]:
        for top_p in (0.3, 0.6, 1.0):
            def first_token(choose):
                drafted = choose(warp(q.log()[None], top_p=top_p))
                verdict = verify_token(torch.stack([p, p]), q[None], drafted, choose)
                return (drafted if verdict.n else verdict.token).item()

            case = f"p = {rounded(p)}, q = {rounded(q)}, top_p = {top_p}:"
            right = law(first_token, 100)
            gain = [right.get(x, 0) - p[x].item() for x in range(len(p))]
            written, variation, gainers = answer(p, q, top_p)
            check_law(dict(enumerate(written.tolist())), right, f"{case} the first token")
            distance = sum(map(abs, gain)) / 2
            assert abs(variation - distance) < EXACT, (
                f"{case} the total variation distance is {distance:.6f}, not {variation:.6f}")
            right_gainers = {x for x in range(len(p)) if gain[x] > 1e-9}
            assert set(gainers) == right_gainers, (
                f"{case} the tokens that gain are {right_gainers or 'none'}, not {set(gainers)}")


def rounded(row):
    return tuple(round(x, 3) for x in row.tolist())


def measured(alphas, c, v, seed):
    """Rows of figures as a noisy machine gives them, with an alpha of its own for each gamma."""
    rows = []
    for gamma, alpha, noise in zip((1, 2, 4, 8), alphas, random_table(4, seed=seed).tolist()):
        passes = 4000 // (gamma + 1)
        drafts = 0.95 * gamma  # a round: the last one of a text is clipped
        accepted = round(passes * (expected_tokens(alpha, drafts) - 1))
        tokens_per_pass = 1 + accepted / passes
        rows.append({
            "gamma": gamma, "passes": passes, "new_tokens": passes + accepted,
            "drafted": round(passes * drafts), "tested": round(accepted / alpha),
            "accepted": accepted, "tokens_per_pass": tokens_per_pass,
            "alpha": accepted / round(accepted / alpha),
            "speedup": tokens_per_pass / (v + c * drafts) * (1 + 0.05 * noise)})
    return rows


def check_fit(answer):
    """alpha from all counts, c and v of the line through all rows, gamma from 0 to 20."""
    cases = [  # what is measured, and the gamma that suits it
        ((0.8, 0.78, 0.74, 0.7), 0.1, 1.2, 5),
        ((0.7, 0.6, 0.62, 0.55), 0.15, 1.1, 3),
        ((0.95, 0.96, 0.97, 0.98), 0.01, 1.3, 20),
        ((0.3, 0.35, 0.25, 0.3), 0.4, 1.2, 0)]
    for seed, (alphas, c, v, right_gamma) in enumerate(cases):
        rows = measured(alphas, c, v, seed)
        alpha, c, v, gamma = answer(rows)
        right = sum(row["accepted"] for row in rows) / sum(row["tested"] for row in rows)
        assert abs(alpha - right) < 1e-6, (
            f"alpha is {alpha:.4f}, and {right:.4f} is right: of all drafts that were tested, in "
            "all rows together, the part that was accepted")
        check_line(rows, c, v)
        assert gamma == right_gamma, (
            f"gamma is {gamma}, and {right_gamma} is right for alpha {alpha:.4f}, c {c:.4f} and "
            f"v {v:.4f}: of 1 to 20 the one with the largest expected speedup, or 0 where none is "
            "above 1")


def check_line(rows, c, v):
    """At the least sum of squares the errors are 0 on average, and do not go with the drafts."""
    drafts = table(*(row["drafted"] / row["passes"] for row in rows))
    costs = table(*(row["tokens_per_pass"] / row["speedup"] for row in rows))
    errors = costs - (v + c * drafts)
    assert max(abs(errors.sum()), abs((errors * drafts).sum())) < 1e-6, (
        f"c = {c:.4f} and v = {v:.4f} are not the line v + c · (drafts a round) with the least sum "
        f"of squares: the drafts a round are {rounded(drafts)}, and a round costs {rounded(costs)} "
        f"plain steps, where that line has {rounded(costs - errors)}")


# ---------------------------------------------------------------- 4 to 6: drafters

def one_hot_drafts(ids, vocab_size):
    drafted = torch.tensor(ids, dtype=torch.long, device=DEVICE)
    return drafted, F.one_hot(drafted, vocab_size).double()


# Rounds of a text: gamma asked for, drafts wanted if the answer is right, the most that the drafter
# inside gives, how many of the drafts stand.
ROUNDS = [(4, 1, 9, 1), (4, 2, 9, 2), (4, 3, 9, 1), (4, 2, 9, 2), (4, 3, 9, 3), (4, 4, 9, 4),
          (4, 4, 9, 4), (4, 4, 9, 4), (4, 4, 9, 3), (4, 3, 9, 3), (4, 4, 1, 1), (4, 2, 9, 0),
          (4, 1, 9, 0), (4, 1, 9, 0), (4, 1, 9, 1), (4, 2, 0, 0), (4, 1, 9, 1), (4, 2, 9, 2),
          (1, 1, 9, 1), (4, 2, 9, 2), (4, 3, 1, 0), (4, 1, 9, 1), (0, 0, 9, 0)]


def adaptive_rounds(answer, rounds):
    """Yields after each round. A text starts with three tokens; a round adds n + 1."""
    asked, given, text, history = None, None, [0, 0, 0], "it is the first round"

    def inside(tokens, gamma, choose):
        nonlocal asked, given
        asked, given = gamma, one_hot_drafts([1] * min(gamma, gives), 2)
        return given

    propose = answer(inside)
    for number, (gamma, wanted, gives, stand) in enumerate(rounds, 1):
        drafted, q = propose(list(text), gamma, None)
        assert asked == wanted, (
            f"round {number} of a text: the drafter was asked for {asked} drafts, and {wanted} is "
            f"right where gamma is {gamma} and {history}")
        assert len(drafted) == len(given[0]) == len(q), (
            f"round {number} of a text: {len(drafted)} drafts and {len(q)} rows of q were sent on, "
            f"of {len(given[0])} that the drafter gave")
        text += [1] * (stand + 1)
        history = f"of the {len(drafted)} drafts before {stand} stood"
        yield


def check_adaptive(answer):
    """The length follows the verdicts, of two texts at once too, and the law is the target's."""
    list(adaptive_rounds(answer, ROUNDS))
    both = zip(adaptive_rounds(answer, ROUNDS[:5]), adaptive_rounds(answer, [(4, 1, 9, 0)] * 5))
    try:
        list(both)
    except AssertionError as error:
        raise AssertionError(f"two texts at once, a drafter for each: {error}") from None
    check_text(lambda: answer(model_drafter()), new=4)


def check_ngram(answer):
    """q is of the counts of the text so far, as that grows, and the drafts are drawn from it."""
    whole, V = [2, 0, 1, 0, 0, 1, 1], 3
    propose = answer(V, DEVICE, 0.5)
    for length in (1, 2, 4, 7):
        text = whole[:length]
        pairs = list(zip(text, text[1:]))
        counts = table(*([pairs.count((a, b)) + 0.5 for b in range(V)] for a in range(V)))
        after = counts / counts.sum(-1, keepdim=True)
        drafted, q = propose(list(text), 0, lambda probs: probs.argmax(-1))
        assert drafted.shape == (0,) and q.shape == (0, V), (
            f"for gamma 0 drafted must be (0,) and q (0, {V}), not {(*drafted.shape,)} and "
            f"{(*q.shape,)}")
        for weight, (drafted, q) in outcomes(lambda choose: propose(list(text), 3, choose), 27):
            assert drafted.shape == (3,) and q.shape == (3, V) and q.dtype == torch.float64, (
                f"drafted must be (3,) and q (3, {V}) in float64, not {(*drafted.shape,)} and "
                f"{(*q.shape,)} in {q.dtype}")
            for last, row in zip([text[-1], *drafted.tolist()], q):
                assert (row - after[last]).abs().max() < EXACT, (
                    f"after the text {text}, the draft that follows the token {last} has the q "
                    f"{rounded(row)}, and {rounded(after[last])} is right, with smoothing 0.5")
            by_q = q.gather(-1, drafted[:, None]).prod().item()
            assert abs(weight - by_q) < EXACT, (
                f"the drafts {drafted.tolist()} were drawn with probability {weight:.4f}, and the "
                f"reported q gives them {by_q:.4f}: q is not what they were drawn from")


def check_shared_noise(answer):
    """On the same noise the text is that of plain decoding, to the end of the context, whatever the
    draft model and gamma; and a draft model that is the target never fails."""
    V, context, prompt = 6, 16, [3, 1, 4]
    target, draft = random_gpt(V, n_layer=2, seed=1), random_gpt(V, seed=2)
    short = random_gpt(V, seed=2, context=11)  # drafts fewer than asked, then none
    new = context + 1 - len(prompt)  # the last token fills the context: it is never fed
    for seed in range(3):
        noise = exponentials(context + 1, V, seed)
        rows = iter(noise[len(prompt):])
        text = list(plain(target, prompt, new, hot, lambda p: (p / next(rows)).argmax(-1)))
        for model, gamma in [(draft, 1), (draft, 4), (short, 4), (target, 4)]:
            propose, verify = answer(DraftModel(model, hot), noise)
            rounds = speculative(target, propose, prompt, new, gamma, hot, not_used, verify)
            passes = check_on_noise(rounds, noise, len(prompt), text)
            assert model is not target or passes == math.ceil(new / (gamma + 1)), (
                "the target as its own draft model had drafts rejected: on the same noise both "
                "draw the same tokens")


def exponentials(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    empty = torch.empty(rows, columns, dtype=torch.float64)
    return empty.exponential_(generator=generator).to(DEVICE)


def not_used(probs):
    raise AssertionError("the loop's own choose was used: all draws are to be taken from the noise")


def check_on_noise(rounds, noise, position, text):
    """The number of rounds, after a look at each as it comes."""
    for number, one in enumerate(rounds, 1):
        for i, x in enumerate(one.drafts):
            right = (one.q[i] / noise[position + i]).argmax().item()
            assert x == right, (
                f"draft {i + 1} of round {number} is for position {position + i} of the text: the "
                f"noise of that row draws the token {right} from its q, not {x}")
        right = text[:len(one.new)]
        assert one.new == right, (
            f"round {number}, which starts at position {position}, wrote {one.new}, and plain "
            f"decoding on the same noise writes {right}")
        position, text = position + len(one.new), text[len(one.new):]
    return number


# ---------------------------------------------------------------- 7 and 8: other drafts

def check_verify_two(answer):
    """The text has the target's law, and one of the two stands as often as the rule lets it."""
    for p, q in [(P, Q), (table(0.6, 0.25, 0.15), table(0.5, 0.2, 0.3)), (table(0.5, 0.4, 0.1),
                 table(0.2, 0.2, 0.6)), (P, P), (table(1.0, 0.0, 0.0), Q)]:
        after = torch.stack([P, Q, P.roll(1)])  # what comes next, by the token before it

        def write(choose):
            drafted = choose(torch.stack([q, q]))
            which, token = answer(torch.stack([p, *after[drafted]]), q, drafted, choose)
            assert which in (0, 1, 2), f"which must be 0, 1 or 2, not {which}"
            if which:
                return which, (drafted[which - 1].item(), int(token))
            return 0, (int(token), choose(after[int(token)]).item())

        case = f"p = {rounded(p)}, q = {rounded(q)}:"
        written, texts, which = law(write, 200), defaultdict(float), [0.0] * 3
        for (candidate, text), weight in written.items():
            texts[text] += weight
            which[candidate] += weight
        right = {(a, b): (p[a] * after[a, b]).item() for a in range(3) for b in range(3)}
        check_law(texts, right, f"{case} the text does not have the target's law: the text")
        check_stands(p, q, which, case)


def check_stands(p, q, which, case):
    """which: the probability that each candidate stands, from 1 on."""
    left = (p - q).clamp(min=0)
    first = 1 - left.sum().item()
    second = torch.minimum(left, q * (1 - first)).sum().item()
    for number, right in ((1, first), (2, second)):
        assert abs(which[number] - right) < EXACT, (
            f"{case} candidate {number} stands with probability {which[number]:.6f}, and "
            f"{right:.6f} is right")


def check_early_exit(answer):
    """The target's own layers, a head that has learnt, and a target that is as it was before."""
    target, before = (random_gpt(6, n_layer=3, seed=4) for _ in range(2))
    for model in (target, before):
        model.unembed.data.mul_(1.3)
    windows = (random_table(32, 9) * 1e6).long() % 6  # (B, T+1)
    draft = answer(target, 1, windows)
    assert len(draft.blocks) == 1 and draft.blocks[0] is target.blocks[0], (
        "the draft's blocks must be the target's first n_layer, the same objects and not copies")
    assert draft.embed is target.embed, "the draft's embed must be the target's, not a copy"
    assert draft.unembed is not target.unembed, "the draft's head must be its own, not the target's"
    for config, name, n_layer in ((draft.config, "draft", 1), (target.config, "target", 3)):
        assert config == replace(before.config, n_layer=n_layer), (
            f"the {name} has {n_layer} layers, and its config, which a cache is made by, says "
            f"{config}")
    for (name, weight), (_, as_it_was) in zip(target.named_parameters(), before.named_parameters()):
        assert torch.equal(weight, as_it_was), f"the target's weights {name} have moved"
        assert weight.requires_grad, f"the target's weights {name} are left frozen (requires_grad)"
    check_head(draft, before, windows)


@torch.no_grad()
def check_head(draft, target, windows):
    p = target(windows[:, :-1]).softmax(-1)  # (B, T, V)
    trained = total_variation(draft, windows, p).item()
    moved = (draft.unembed - target.unembed).abs().max().item()
    draft.unembed = target.unembed
    untrained = total_variation(draft, windows, p).item()
    assert trained < untrained / 2, (
        f"with its own head 1 - alpha is {trained:.3f} on the windows, and {untrained:.3f} with "
        "the target's: it is to fall to less than half. Was the head trained, 100 steps of "
        "learning rate 0.01, to say what the target says at the same place of the text?")
    assert moved < 1.8, (
        f"a weight of the head is {moved:.2f} from the target's, farther than 100 steps of 0.01 "
        "take it: the head is to start as a copy of the target's")


# ---------------------------------------------------------------- 9 and 10: training, batches

def check_distill(answer):
    """Each loss is the best at its own game, and is where 300 steps of Adam take it, from zeros."""
    p, contexts = (2 * random_table(32, 8)).softmax(-1), 0.05 * random_table(32, 3, seed=1)
    games = {"forward KL": lambda q: (p * (p / q).log()).sum(-1).mean().item(),
             "reverse KL": lambda q: (q * (q / p).log()).sum(-1).mean().item(),
             "total variation": lambda q: 1 - torch.minimum(p, q).sum(-1).mean().item()}
    after_300 = {"forward KL": 0.7820, "reverse KL": 1.1536, "total variation": 0.4894}
    drafts = {loss: answer(p, contexts, loss) for loss in games}
    for loss, q in drafts.items():
        assert q.shape == p.shape and (q.sum(-1) - 1).abs().max() < EXACT, (
            f"{loss}: q must be (N, V) with rows that sum to 1")
        assert not q.requires_grad, f"{loss}: q must be detached"
    for loss, score in games.items():
        best = min(drafts, key=lambda name: score(drafts[name]))
        assert best == loss, (
            f"the draft trained for {best} has less {loss} than the one trained for it")
    for loss, score in games.items():
        reached, right = score(drafts[loss]), after_300[loss]
        assert abs(reached - right) < 3e-4, (
            f"the draft trained for {loss} reaches {reached:.4f} of it on average, and 300 steps "
            f"of Adam with learning rate 0.05 from zeros reach {right:.4f}")


class Watched:
    """The target of a batch: it counts its passes. What it said once costs nothing to say again."""

    def __init__(self, model):
        self.config, self.device, self.passes, self.model = model.config, model.device, 0, model
        self.answers = {}

    @torch.inference_mode()
    def __call__(self, ids):
        self.passes += 1
        key = str(ids.tolist())
        if key not in self.answers:
            self.answers[key] = self.model(ids)
        return self.answers[key]


def watched(propose, text, new):
    """The drafter of one text: it is not to be asked for another, or for drafts past the end."""
    def watching(tokens, gamma, choose):
        assert tokens[:len(text)] == text, (
            f"the drafter of the text {text} was called for another text, {tokens}")
        left = len(text) + new - len(tokens)
        assert left > 0, "a text that is complete was drafted for once more"
        assert gamma < left, (
            f"{gamma} drafts were asked for where a text had {left} to go: the target adds a token "
            f"of its own, so {left - 1} is the most")
        return propose(tokens, gamma, choose)

    return watching


def guess(tokens, gamma, choose):
    """A drafter that draws nothing and gives one draft at most: the last token once more."""
    return one_hot_drafts(tokens[-1:][:gamma], 2)


def batch(answer, target, proposes, texts, new, gamma, warp, choose):
    """What the answer writes, and how many passes it needs."""
    proposes = [watched(propose, text, new) for propose, text in zip(proposes, texts)]
    given, target.passes = [list(text) for text in texts], 0
    written = answer(target, proposes, given, new, gamma, warp, choose)
    assert given == texts, "the texts that were given have been changed"
    return (*map(tuple, written), target.passes)


def one_by_one(target, proposes, texts, new, gamma, warp, choose):
    """The same from the loop, text by text: the batch is done when its slowest text is."""
    rounds = [list(speculative(target, propose, text, new, gamma, warp, choose))
              for propose, text in zip(proposes, texts)]
    written = [tuple(token for one in of_text for token in one.new) for of_text in rounds]
    return (*written, max(map(len, rounds)))


def check_speculative_batch(answer):
    """At temperature 0 three texts are those of the loop; then the exact law of two, and of the
    number of passes, is that of two texts that know nothing of each other."""
    target, draft = (random_gpt(6, n_layer=2, seed=2) for _ in range(2))
    draft.unembed.data += 0.5 * random_table(6, 8, seed=5)
    proposes = [[DraftModel(model, greedy) for model in (target, draft, draft)] for _ in range(2)]
    case = [[0, 1], [4, 0, 1, 1], [1]], 9, 3, greedy, lambda probs: probs.argmax(-1)
    written = batch(answer, Watched(target), proposes[0], *case)
    right = one_by_one(target, proposes[1], *case)
    assert written[:-1] == right[:-1], (
        f"at temperature 0 the new tokens of three texts are {written[:-1]}, and {right[:-1]} are "
        "right")
    assert written[-1] == right[-1], (
        f"three texts of 9 new tokens took {written[-1]} passes of the target, and {right[-1]} are "
        "right: one a round for all, each text keeping all that it accepted")
    watched_target = Watched(TARGET)
    together = law(lambda choose: batch(answer, watched_target, *two_texts(), choose), 500)
    check_law(together, two_alone(),
              "two texts in a batch: (the first, the second, passes of the target) =")


def two_texts():
    return [model_drafter(), guess], [[0, 1], [1]], 3, 2, warp


@functools.cache
def two_alone():
    return law(lambda choose: one_by_one(TARGET, *two_texts(), choose), 500)


CHECKS = {
    "verify_match": check_verify_match, "one_sided_top_p": check_one_sided_top_p, "fit": check_fit,
    "adaptive": check_adaptive, "ngram": check_ngram, "shared_noise": check_shared_noise,
    "verify_two": check_verify_two, "early_exit": check_early_exit, "distill": check_distill,
    "speculative_batch": check_speculative_batch,
}
