"""Plausible answers that are wrong, and the words that meet them. For the teacher: delete this file
before you hand the project out.

Each has one line that says what is wrong with it, and one part of the failure's message.
"""

import copy
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F

import answers
from bench import expected_speedup, expected_tokens
from model import GPT
from sampling import Verdict, residual, row, seeded, verify_token, warp
from train_tiny import total_variation

WRONG = []  # (exercise, wrong answer, words of its failure)


def wrong(exercise, words):
    def keep(answer):
        WRONG.append((exercise, answer, words))
        return answer

    return keep


LAW = "does not have the target's law"


# ---------------------------------------------------------------- 1. sample and match

@wrong("verify_match", "(how many stand, the token after them)")
def counts_behind_a_miss(p, q, drafted, choose):
    """Drafts behind the first that misses are counted too."""
    own = choose(p)
    n = (own[:-1] == drafted).sum()
    return Verdict(n, row(own, n))


@wrong("verify_match", LAW)
def draws_once_more(p, q, drafted, choose):
    """After a miss the token is drawn anew, so a draft that p likes has two chances."""
    n = (choose(p)[:-1] == drafted).cumprod(0).sum()
    return Verdict(n, choose(row(p, n)))


@wrong("verify_match", LAW)
def corrects_from_the_residual(p, q, drafted, choose):
    """The correction of the token rule, after the test of another rule."""
    own = choose(p)
    n = (own[:-1] == drafted).cumprod(0).sum()
    return Verdict(n, choose(residual(row(p, n), row(F.pad(q, (0, 0, 0, 1)), n))))


@wrong("verify_match", LAW)
def always_sends_the_bonus(p, q, drafted, choose):
    """The token comes from the last row, wherever the first miss is."""
    own = choose(p)
    return Verdict((own[:-1] == drafted).cumprod(0).sum(), own[-1])


@wrong("verify_match", LAW)
def matches_other_drafts(p, q, drafted, choose):
    """It compares with new draws from q, not with the drafts that it was given."""
    own = choose(p)
    n = (own[:-1] == choose(q)).cumprod(0).sum()
    return Verdict(n, row(own, n))


@wrong("verify_match", LAW)
def takes_the_likeliest(p, q, drafted, choose):
    """The target's likeliest token in place of a draw."""
    own = p.argmax(-1)
    n = (own[:-1] == drafted).cumprod(0).sum()
    return Verdict(n, row(own, n))


@wrong("verify_match", "(how many stand, the token after them)")
def is_the_token_rule(p, q, drafted, choose):
    """Lossless, but another rule: a draft stands with min(1, p/q)."""
    return verify_token(p, q, drafted, choose)


@wrong("verify_match", "tensors of shape ()")
def keeps_a_dimension(p, q, drafted, choose):
    """n and token have the shape (1,)."""
    verdict = answers.verify_match(p, q, drafted, choose)
    return Verdict(verdict.n[None], verdict.token[None])


# ---------------------------------------------------------------- 2. top-p on one side only

def one_sided(drawn, scored, left, p, gains=lambda gain: gain > 1e-9, half=0.5):
    """An answer's three values. drawn: what a draft is drawn from; scored: what the rule takes for
    that; left: the distribution of the correction."""
    accept = (p / scored).clamp(max=1)
    law = drawn * accept + (drawn * (1 - accept)).sum() * left
    gain = law - p
    gainers = gains(gain).nonzero()[:, 0].tolist()
    return law, gain.abs().sum().item() * half, set(gainers)


def filtered(q, top_p):
    return warp(q.log(), top_p=top_p)


@wrong("one_sided_top_p", "the first token")
def filters_both_sides(p, q, top_p):
    """Drawn from and scored with the filtered q: what is right, and not what is asked for."""
    drawn = filtered(q, top_p)
    return one_sided(drawn, drawn.clamp(min=1e-30), residual(p, drawn), p)


@wrong("one_sided_top_p", "the first token")
def corrects_with_the_filtered_q(p, q, top_p):
    """The residual is of the filtered q, which the rule never sees."""
    drawn = filtered(q, top_p)
    return one_sided(drawn, q, residual(p, drawn), p)


@wrong("one_sided_top_p", "the first token")
def corrects_from_p(p, q, top_p):
    """After a rejection the token is drawn from p."""
    return one_sided(filtered(q, top_p), q, p, p)


@wrong("one_sided_top_p", "the first token")
def leaves_the_residual_unnormalised(p, q, top_p):
    """The residual is not divided by its sum."""
    return one_sided(filtered(q, top_p), q, (p - q).clamp(min=0), p)


@wrong("one_sided_top_p", "the first token")
def rejects_as_the_whole_q_does(p, q, top_p):
    """The probability of a rejection is that of a draft from the whole q."""
    drawn, accept = filtered(q, top_p), (p / q).clamp(max=1)
    law = drawn * accept + (q * (1 - accept)).sum() * residual(p, q)
    return law, (law - p).abs().sum().item() / 2, set((law > p + 1e-9).nonzero()[:, 0].tolist())


@wrong("one_sided_top_p", "the first token")
def filters_without_norm(p, q, top_p):
    """The filtered q does not sum to 1."""
    return one_sided(q.where(filtered(q, top_p) > 0, 0), q, residual(p, q), p)


@wrong("one_sided_top_p", "total variation distance")
def forgets_the_half(p, q, top_p):
    """The distance is the sum of all differences: twice the total variation."""
    return one_sided(filtered(q, top_p), q, residual(p, q), p, half=1)


@wrong("one_sided_top_p", "tokens that gain")
def takes_rounding_for_a_gain(p, q, top_p):
    """Every difference above 0 is called a gain, rounding too."""
    return one_sided(filtered(q, top_p), q, residual(p, q), p, gains=lambda gain: gain > 0)


@wrong("one_sided_top_p", "tokens that gain")
def names_all_that_the_filter_kept(p, q, top_p):
    """It takes for granted that just the kept tokens gain."""
    drawn = filtered(q, top_p)
    return one_sided(drawn, q, residual(p, q), p, gains=lambda _: drawn > 0)


# ---------------------------------------------------------------- 3. from measurements to gamma

def fitted(rows, alpha=None, drafts=None, cost=None, gammas=range(1, 21), least=0):
    """The answer in parts: each, where it is given, takes the place of the right one."""
    if alpha is None:
        alpha = sum(row["accepted"] for row in rows) / sum(row["tested"] for row in rows)
    drafts = drafts or (lambda row: row["drafted"] / row["passes"])
    cost = cost or (lambda row: row["tokens_per_pass"] / row["speedup"])
    c, v = line([drafts(row) for row in rows], [cost(row) for row in rows])
    gain = {gamma: expected_speedup(expected_tokens(alpha, gamma), gamma, c, v) for gamma in gammas}
    gain[0] = 1.0 if least == 0 else 0.0
    return alpha, c, v, max(gain, key=gain.get)


def line(xs, ys):
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)
    return slope, y - slope * x


@wrong("fit", "alpha is")
def takes_the_mean_of_ratios(rows):
    """Each row's alpha counts the same, however many drafts it tested."""
    return fitted(rows, alpha=sum(row["accepted"] / row["tested"] for row in rows) / len(rows))


@wrong("fit", "alpha is")
def takes_alpha_from_the_first_row(rows):
    """alpha of the first row alone."""
    return fitted(rows, alpha=rows[0]["accepted"] / rows[0]["tested"])


@wrong("fit", "alpha is")
def divides_by_all_that_was_drafted(rows):
    """accepted / drafted: drafts behind a rejection were never tested."""
    accepted, drafted = (sum(row[key] for row in rows) for key in ("accepted", "drafted"))
    return fitted(rows, alpha=accepted / drafted)


@wrong("fit", "alpha is")
def solves_equation_1(rows):
    """alpha from tokens per pass by Equation 1 in place of the counts."""
    def miss(alpha):
        return sum((expected_tokens(alpha, row["gamma"]) - row["tokens_per_pass"]) ** 2
                   for row in rows)

    return fitted(rows, alpha=min((i / 10000 for i in range(10000)), key=miss))


@wrong("fit", "least sum of squares")
def costs_by_equation_1(rows):
    """A round's cost from Equation 1 in place of the tokens per pass that were counted."""
    alpha = sum(row["accepted"] for row in rows) / sum(row["tested"] for row in rows)
    return fitted(rows, cost=lambda row: expected_tokens(alpha, row["gamma"]) / row["speedup"])


@wrong("fit", "least sum of squares")
def draws_the_line_through_two_rows(rows):
    """c and v from the first row and the last alone."""
    _, c, v, gamma = fitted([rows[0], rows[-1]])
    return fitted(rows)[0], c, v, gamma


@wrong("fit", "least sum of squares")
def takes_gamma_for_the_drafts(rows):
    """gamma in place of drafts a round, which clipped rounds make fewer."""
    return fitted(rows, drafts=lambda row: row["gamma"])


@wrong("fit", "least sum of squares")
def takes_v_to_be_1(rows):
    """A line through v = 1, as if a target pass over more rows cost no more."""
    alpha, _, _, gamma = fitted(rows)
    drafts = [row["drafted"] / row["passes"] for row in rows]
    costs = [row["tokens_per_pass"] / row["speedup"] - 1 for row in rows]
    return alpha, sum(a * b for a, b in zip(drafts, costs)) / sum(a * a for a in drafts), 1.0, gamma


@wrong("fit", "gamma is 19, and 20 is right")
def ends_at_19(rows):
    """range(1, 20) ends at 19."""
    return fitted(rows, gammas=range(1, 20))


@wrong("fit", "and 0 is right")
def never_says_0(rows):
    """gamma is 1 at least, also where no gamma beats plain decoding."""
    return fitted(rows, least=1)


# ---------------------------------------------------------------- 4. a draft length that adapts

def adapting(propose, change, first=1, send=lambda drafted, q: (drafted, q)):
    """An adaptive drafter. change(grown, had, asked, wanted) -> the new wanted: grown by how many
    tokens, drafts that it had, drafts that it asked for."""
    before, had, asked, wanted = None, 0, 0, first

    def propose_adapting(tokens, gamma, choose):
        nonlocal before, had, asked, wanted
        if before is not None:
            wanted = change(len(tokens) - before, had, asked, wanted)
        asked = min(wanted, gamma)
        drafted, q = send(*propose(tokens, asked, choose))
        before, had = len(tokens), len(drafted)
        return drafted, q

    return propose_adapting


def right_change(grown, had, asked, wanted):
    return had + 1 if grown == had + 1 else max(1, had - 1)


@wrong("adaptive", "right where gamma is 4 and of the 1 drafts before 1 stood")
def compares_with_the_drafts_wanted(propose):
    """The text's growth is compared with the drafts asked for, not with those received."""
    return adapting(propose, lambda grown, had, asked, wanted:
                    asked + 1 if grown == asked + 1 else max(1, asked - 1))


state = {"before": None, "had": 0}


@wrong("adaptive", "two texts at once")
def keeps_its_state_in_a_global(propose):
    """All texts share one state of the module."""
    state.update(before=None, had=0)

    def propose_adapting(tokens, gamma, choose):
        wanted = 1
        if state["before"] is not None:
            wanted = right_change(len(tokens) - state["before"], state["had"], None, None)
        drafted, q = propose(tokens, min(wanted, gamma), choose)
        state.update(before=len(tokens), had=len(drafted))
        return drafted, q

    return propose_adapting


@wrong("adaptive", "of the 4 drafts before 3 stood")
def grows_past_the_cap(propose):
    """What it wants goes on growing while gamma caps it, and takes as long to come down."""
    return adapting(propose, lambda grown, had, asked, wanted:
                    wanted + 1 if grown == had + 1 else max(1, wanted - 1))


@wrong("adaptive", "of the 1 drafts before 0 stood")
def goes_down_to_nothing(propose):
    """Without a floor it ends at 0 drafts."""
    return adapting(propose, lambda grown, had, asked, wanted:
                    had + 1 if grown == had + 1 else max(0, had - 1))


@wrong("adaptive", "round 2 of a text")
def forgets_the_targets_token(propose):
    """A round whose drafts all stood makes the text longer by one more than the drafts."""
    return adapting(propose, lambda grown, had, asked, wanted:
                    had + 1 if grown == had else max(1, had - 1))


@wrong("adaptive", "of the 3 drafts before 1 stood")
def starts_over_after_a_rejection(propose):
    """One draft after a rejection, in place of one fewer."""
    return adapting(propose, lambda grown, had, asked, wanted: had + 1 if grown == had + 1 else 1)


@wrong("adaptive", "of the 3 drafts before 1 stood")
def goes_by_the_number_that_stood(propose):
    """One more than stood, whatever was rejected: it falls too far after a bad round."""
    return adapting(propose, lambda grown, had, asked, wanted:
                    had + 1 if grown == had + 1 else max(1, grown - 1))


@wrong("adaptive", "round 1 of a text")
def starts_at_gamma(propose):
    """It drafts as many as it may at first."""
    return adapting(propose, right_change, first=100)


@wrong("adaptive", "round 1 of a text")
def drafts_all_and_sends_few(propose):
    """The drafter inside makes all of gamma, and what is not wanted is thrown away."""
    count = adapting(lambda tokens, wanted, choose: ([0] * wanted, None), right_change)

    def propose_few(tokens, gamma, choose):
        wanted = len(count(tokens, gamma, choose)[0])
        drafted, q = propose(tokens, gamma, choose)
        return drafted[:wanted], q[:wanted]

    return propose_few


@wrong("adaptive", LAW)
def drops_a_draft_that_it_has_seen(propose):
    """A draft with a small q(x) is not sent: it was chosen by what it turned out to be."""
    def send(drafted, q):
        likely = (q.gather(-1, drafted[:, None])[:, 0] > 0.5).cumprod(0).sum()
        return drafted[:likely], q[:likely]

    return adapting(propose, right_change, send=send)


# ---------------------------------------------------------------- 5. an n-gram drafter

def count(tokens, vocab_size, device, smoothing):
    counts = torch.full((vocab_size, vocab_size), smoothing, dtype=torch.float64)
    for a, b in zip(tokens, tokens[1:]):
        counts[a, b] += 1
    return counts.to(device)


def drafts_from(counts, tokens, gamma, choose, show=lambda q, x: q):
    """Drafts and q, by a table of counts. show(q, x): the row that is reported."""
    after, last, drafted = counts / counts.sum(-1, keepdim=True), tokens[-1], []
    q = after[:0]
    for _ in range(gamma):
        q_row = after[last]
        last = choose(q_row)
        drafted.append(int(last))
        q = torch.cat([q, show(q_row, last)[None]])
    return torch.tensor(drafted, dtype=torch.long, device=counts.device), q


@wrong("ngram", "has the q")
def counts_once(vocab_size, device, smoothing=0.1):
    """The counts are those of the first call, however much the text grows."""
    counts = None

    def propose(tokens, gamma, choose):
        nonlocal counts
        if counts is None:
            counts = count(tokens, vocab_size, device, smoothing)
        return drafts_from(counts, tokens, gamma, choose)

    return propose


@wrong("ngram", "has the q")
def misses_the_pair_at_the_seam(vocab_size, device, smoothing=0.1):
    """New tokens are counted alone: the pair of the last known and the first new is missed."""
    counts, known = count([], vocab_size, device, smoothing), 0

    def propose(tokens, gamma, choose):
        nonlocal known
        counts.add_(count(tokens[known:], vocab_size, device, 0))
        known = len(tokens)
        return drafts_from(counts, tokens, gamma, choose)

    return propose


@wrong("ngram", "has the q")
def counts_the_drafts_too(vocab_size, device, smoothing=0.1):
    """Drafts join the counts as if they were text."""
    def propose(tokens, gamma, choose):
        text, q = list(tokens), torch.empty(0, vocab_size, dtype=torch.float64, device=device)
        for _ in range(gamma):
            x, q_row = drafts_from(count(text, vocab_size, device, smoothing), text, 1, choose)
            text, q = text + x.tolist(), torch.cat([q, q_row])
        return torch.tensor(text[len(tokens):], dtype=torch.long, device=device), q

    return propose


@wrong("ngram", "not what they were drawn from")
def proposes_the_likeliest(vocab_size, device, smoothing=0.1):
    """The likeliest token, reported with the soft q."""
    def propose(tokens, gamma, choose):
        counts = count(tokens, vocab_size, device, smoothing)
        return drafts_from(counts, tokens, gamma, lambda probs: probs.argmax(-1))

    return propose


@wrong("ngram", "has the q")
def reports_one_hot_rows(vocab_size, device, smoothing=0.1):
    """Drawn from the soft q, reported as certain."""
    def propose(tokens, gamma, choose):
        counts = count(tokens, vocab_size, device, smoothing)
        return drafts_from(counts, tokens, gamma, choose,
                           show=lambda q, x: F.one_hot(x, vocab_size).double())

    return propose


@wrong("ngram", "has the q")
def draws_all_after_the_last_token(vocab_size, device, smoothing=0.1):
    """Every draft follows the last token of the text, not the draft before it."""
    def propose(tokens, gamma, choose):
        counts = count(tokens, vocab_size, device, smoothing)[tokens[-1]]
        q = (counts / counts.sum()).expand(gamma, -1)
        return choose(q), q

    return propose


@wrong("ngram", "has the q")
def counts_what_comes_before(vocab_size, device, smoothing=0.1):
    """The table is transposed: what came before a token, not after."""
    def propose(tokens, gamma, choose):
        counts = count(tokens[::-1], vocab_size, device, smoothing)
        return drafts_from(counts, tokens, gamma, choose)

    return propose


@wrong("ngram", "has the q")
def smooths_what_was_seen_alone(vocab_size, device, smoothing=0.1):
    """A pair that never came keeps the probability 0, unless its row is empty."""
    def propose(tokens, gamma, choose):
        counts = count(tokens, vocab_size, device, 0)
        smoothed = (counts > 0) | (counts.sum(-1, keepdim=True) == 0)
        counts = torch.where(smoothed, counts + smoothing, 0)
        return drafts_from(counts, tokens, gamma, choose)

    return propose


@wrong("ngram", "has the q")
def has_a_smoothing_of_its_own(vocab_size, device, smoothing=0.1):
    """It always smooths with 0.1."""
    return answers.ngram(vocab_size, device)


@wrong("ngram", "in float64, not")
def reports_float32(vocab_size, device, smoothing=0.1):
    """q in float32: too coarse for a target in float64."""
    right = answers.ngram(vocab_size, device, smoothing)

    def propose(tokens, gamma, choose):
        drafted, q = right(tokens, gamma, choose)
        return drafted, q.float()

    return propose


@wrong("ngram", "non-empty")
def stacks_no_drafts(vocab_size, device, smoothing=0.1):
    """For gamma 0 there is nothing to stack: it crashes in the last round of every text."""
    def propose(tokens, gamma, choose):
        counts, last, q = count(tokens, vocab_size, device, smoothing), tokens[-1], []
        drafted = []
        for _ in range(gamma):
            q.append(counts[last] / counts[last].sum())
            last = choose(q[-1])
            drafted.append(last)
        return torch.stack(drafted), torch.stack(q)

    return propose


# ---------------------------------------------------------------- 6. shared noise

def on_noise(propose, noise, draft_rows=None, target_rows=None):
    """The answer, with other rows of the noise. draft_rows(length): those of the drafts, from the
    first on, after a text of that length. target_rows(length, count): those of the target."""
    draft_rows = draft_rows or (lambda length: noise[length:])
    target_rows = target_rows or (lambda length, count: noise[length:length + count])
    length = 0

    def propose_on_noise(tokens, gamma, choose):
        nonlocal length
        length = len(tokens)
        rows = iter(draft_rows(length))
        return propose(tokens, gamma, lambda probs: (probs / next(rows)).argmax(-1))

    def verify_on_noise(p, q, drafted, choose):
        own = (p / target_rows(length, len(p))).argmax(-1)
        n = (own[:-1] == drafted).cumprod(0).sum()
        return Verdict(n, row(own, n))

    return propose_on_noise, verify_on_noise


@wrong("shared_noise", "draft 1 of round 1 is for position 3")
def drafts_on_the_row_before(propose, noise):
    """The first draft takes the noise of the last token of the text."""
    return on_noise(propose, noise, draft_rows=lambda length: noise[length - 1:])


@wrong("shared_noise", "plain decoding on the same noise writes")
def judges_on_the_row_before(propose, noise):
    """The target's first row takes the noise of the last token of the text."""
    return on_noise(propose, noise,
                    target_rows=lambda length, count: noise[length - 1:length - 1 + count])


@wrong("shared_noise", "draft 1 of round 1 is for position 3")
def starts_at_row_0_each_round(propose, noise):
    """The rows are counted from the start of the round, not from that of the text."""
    return on_noise(propose, noise, lambda length: noise, lambda length, count: noise[:count])


@wrong("shared_noise", "plain decoding on the same noise writes")
def uses_up_the_noise(propose, noise):
    """Each draw takes the next row, so rejected drafts use up the noise of later positions."""
    rows = None

    def next_rows(length):
        nonlocal rows
        rows = rows or iter(noise[length:])
        return rows

    return on_noise(propose, noise, next_rows,
                    lambda length, count: torch.stack([next(rows) for _ in range(count)]))


@wrong("shared_noise", "plain decoding on the same noise writes")
def counts_rejected_drafts(propose, noise):
    """After the first round it counts positions by itself, γ+1 a round, rejected drafts too."""
    position = None

    def draft_rows(length):
        nonlocal position
        position = position or length
        return noise[position:]

    def target_rows(length, count):
        nonlocal position
        position += count
        return noise[position - count:position]

    return on_noise(propose, noise, draft_rows, target_rows)


@wrong("shared_noise", "plain decoding on the same noise writes")
def takes_one_row_a_round(propose, noise):
    """All positions of a round share the noise of the first."""
    return on_noise(propose, noise, lambda length: noise[length].expand_as(noise),
                    lambda length, count: noise[length])


@wrong("shared_noise", "the loop's own choose was used")
def drafts_with_the_loops_choose(propose, noise):
    """Only the target is on the noise."""
    propose_on_noise, verify = on_noise(propose, noise)

    def propose_as_ever(tokens, gamma, choose):
        propose_on_noise(tokens, 0, None)
        return propose(tokens, gamma, choose)

    return propose_as_ever, verify


@wrong("shared_noise", "plain decoding on the same noise writes")
def judges_by_the_token_rule(propose, noise):
    """The token rule keeps a draft for its p/q: lossless, and not the text of plain decoding."""
    choose = seeded(noise.device, 0)
    return on_noise(propose, noise)[0], lambda p, q, drafted, _: verify_token(p, q, drafted, choose)


@wrong("shared_noise", "must match the size")
def counts_on_gamma_drafts(propose, noise):
    """It takes γ+1 rows for the target, also where the drafter gave fewer drafts than γ."""
    asked = 0

    def propose_and_count(tokens, gamma, choose):
        nonlocal asked
        asked = gamma
        return propose_on_noise(tokens, gamma, choose)

    propose_on_noise, verify = on_noise(
        propose, noise, target_rows=lambda length, count: noise[length:length + asked + 1])
    return propose_and_count, verify


# ---------------------------------------------------------------- 7. two drafts for one position

def two(p, q, drafted, choose, judge, correct, bonus=lambda which: which):
    """judge(i, left): what candidate i+1 is judged by, where `left` is what is left of p;
    correct(left): what the correction is drawn from."""
    left = p[0]
    for i, x in enumerate(drafted.tolist()):
        accept = (judge(i, left)[x] / q[x]).clamp(max=1)
        if choose(torch.stack([1 - accept, accept])) == 1:
            return i + 1, choose(p[bonus(i + 1)]).item()
        left = residual(left, q)
    return 0, choose(correct(left)).item()


@wrong("verify_two", "p = (0.6, 0.25, 0.15)")
def judges_the_second_without_the_norm(p, q, drafted, choose):
    """The second is tested by max(0, p - q), which sums to less than 1."""
    return two(p, q, drafted, choose, lambda i, left: (p[0] - q).clamp(min=0) if i else p[0],
               lambda left: left)


@wrong("verify_two", LAW)
def judges_both_by_p(p, q, drafted, choose):
    """The second is tested by p again, as if the first had not been rejected."""
    return two(p, q, drafted, choose, lambda i, left: p[0], lambda left: left)


@wrong("verify_two", LAW)
def corrects_after_one(p, q, drafted, choose):
    """When both fail, the correction is drawn from what the first alone leaves."""
    return two(p, q, drafted, choose, lambda i, left: left, lambda left: residual(p[0], q))


@wrong("verify_two", LAW)
def corrects_with_p(p, q, drafted, choose):
    """When both fail, the correction is drawn from p."""
    return two(p, q, drafted, choose, lambda i, left: left, lambda left: p[0])


@wrong("verify_two", LAW)
def subtracts_q_twice(p, q, drafted, choose):
    """The correction is drawn from norm(max(0, p - 2q)): the norm between the two is left out."""
    return two(p, q, drafted, choose, lambda i, left: left, lambda left: residual(p[0], 2 * q))


@wrong("verify_two", "candidate 2 stands with probability 0.000000")
def ignores_the_second(p, q, drafted, choose):
    """Lossless, but the second has no chance."""
    accept = (p[0] / q)[drafted[0]].clamp(max=1)
    if choose(torch.stack([1 - accept, accept])) == 1:
        return 1, choose(p[1]).item()
    return 0, choose(residual(p[0], q)).item()


@wrong("verify_two", LAW)
def sends_the_bonus_of_the_first(p, q, drafted, choose):
    """The bonus after the second candidate is drawn from row 1."""
    return two(p, q, drafted, choose, lambda i, left: left, lambda left: left,
               bonus=lambda which: 1)


@wrong("verify_two", LAW)
def counts_rows_from_0(p, q, drafted, choose):
    """The bonus is drawn from the row before the candidate's own."""
    return two(p, q, drafted, choose, lambda i, left: left, lambda left: left,
               bonus=lambda which: which - 1)


@wrong("verify_two", LAW)
def tests_the_better_one_first(p, q, drafted, choose):
    """The candidate with the larger p/q is tested first: it is then no draw from q any more."""
    ratio = (p[0] / q)[drafted]
    order = ratio.argsort(descending=True, stable=True)
    which, token = answers.verify_two(p[[0, *(1 + order).tolist()]], q, drafted[order], choose)
    return int(order[which - 1]) + 1 if which else 0, token


@wrong("verify_two", LAW)
def takes_the_first_out_of_q(p, q, drafted, choose):
    """The second is judged as if drawn without replacement, from q without the first candidate."""
    x, y = drafted.tolist()
    accept = (p[0] / q)[x].clamp(max=1)
    if choose(torch.stack([1 - accept, accept])) == 1:
        return 1, choose(p[1]).item()
    left, q = residual(p[0], q), q.index_fill(0, drafted[:1], 0)
    q = q / q.sum()
    accept = (left[y] / q[y].clamp(min=1e-30)).clamp(max=1)
    if choose(torch.stack([1 - accept, accept])) == 1:
        return 2, choose(p[2]).item()
    return 0, choose(residual(left, q)).item()


# ---------------------------------------------------------------- 8. early exit

def exit_model(target, layers, head):
    config = replace(target.config, n_layer=len(layers))
    draft = GPT(config).to(target.device, target.embed.dtype)
    draft.embed, draft.blocks = target.embed, nn.ModuleList(layers)
    draft.unembed = nn.Parameter(head.detach().clone())
    return draft


def train(draft, windows, p, learning_rate=0.01, weights=None):
    weights = weights or [draft.unembed]
    optimizer = torch.optim.Adam(weights, lr=learning_rate)
    for _ in range(100):
        optimizer.zero_grad()
        total_variation(draft, windows, p).backward(inputs=weights)
        optimizer.step()
    return draft


@torch.no_grad()
def target_p(target, windows):
    return target(windows[:, :-1]).softmax(-1)  # (B, T, V)


@wrong("early_exit", "fall to less than half")
def imitates_the_next_place(target, n_layer, windows):
    """The target's probabilities are one place further on than the draft's."""
    draft = exit_model(target, target.blocks[:n_layer], target.unembed)
    with torch.no_grad():
        p = target(windows[:, 1:]).softmax(-1)
    return train(draft, windows, p)


@wrong("early_exit", "fall to less than half")
def imitates_the_text(target, n_layer, windows):
    """Trained for the tokens of the windows, not for what the target says."""
    draft = exit_model(target, target.blocks[:n_layer], target.unembed)
    return train(draft, windows, F.one_hot(windows[:, 1:], target.config.vocab_size).double())


@wrong("early_exit", "start as a copy")
def starts_at_random(target, n_layer, windows):
    """The head starts from small random numbers."""
    head = 0.02 * torch.randn(target.unembed.shape, generator=torch.Generator().manual_seed(0))
    draft = exit_model(target, target.blocks[:n_layer], head.to(target.unembed))
    return train(draft, windows, target_p(target, windows))


@wrong("early_exit", "the draft has 1 layers, and its config")
def names_all_layers(target, n_layer, windows):
    """The draft's config still has all layers of the target, and its cache room for them."""
    draft = answers.early_exit(target, n_layer, windows)
    draft.config = target.config
    return draft


@wrong("early_exit", "the target has 3 layers, and its config")
def changes_the_targets_config(target, n_layer, windows):
    """The config is not copied: now the target's own says n_layer too."""
    draft = answers.early_exit(target, n_layer, windows)
    target.config.n_layer = n_layer
    draft.config = target.config
    return draft


@wrong("early_exit", "left frozen")
def leaves_the_target_frozen(target, n_layer, windows):
    """The target's weights ask for no gradient any more: it cannot be trained on."""
    target.requires_grad_(False)
    return answers.early_exit(target, n_layer, windows)


@wrong("early_exit", "fall to less than half")
def hardly_moves(target, n_layer, windows):
    """A learning rate of 0.0001."""
    draft = exit_model(target, target.blocks[:n_layer], target.unembed)
    return train(draft, windows, target_p(target, windows), learning_rate=1e-4)


@wrong("early_exit", "not copies")
def copies_the_layers(target, n_layer, windows):
    """The draft has layers of its own, of the same values: twice the memory."""
    draft = exit_model(target, copy.deepcopy(target.blocks[:n_layer]), target.unembed)
    return train(draft, windows, target_p(target, windows))


@wrong("early_exit", "not copies")
def takes_the_last_layers(target, n_layer, windows):
    """The last layers of the target, which never saw an embedding."""
    draft = exit_model(target, target.blocks[-n_layer:], target.unembed)
    return train(draft, windows, target_p(target, windows))


@wrong("early_exit", "have moved")
def trains_all_weights(target, n_layer, windows):
    """The optimizer has all weights of the draft, and so some of the target's."""
    p = target_p(target, windows)
    draft = exit_model(target, target.blocks[:n_layer], target.unembed)
    return train(draft, windows, p, weights=list(draft.parameters()))


@wrong("early_exit", "head must be its own")
def trains_the_targets_head(target, n_layer, windows):
    """The head is the target's own, and training it changes the target."""
    p = target_p(target, windows)
    draft = exit_model(target, target.blocks[:n_layer], target.unembed)
    draft.unembed = target.unembed
    return train(draft, windows, p)


# ---------------------------------------------------------------- 9. what to distil for

def distilled(p, contexts, loss_of, steps=300, learning_rate=0.05, start=0.0,
              method=torch.optim.Adam):
    generator = torch.Generator().manual_seed(0)
    W = start * torch.randn(contexts.shape[1], p.shape[1], generator=generator, dtype=p.dtype)
    W = W.to(p.device).requires_grad_()
    optimizer = method([W], lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(p, (contexts @ W).softmax(-1)).mean().backward()
        optimizer.step()
    return (contexts @ W).softmax(-1).detach()


LOSSES = {"forward KL": lambda p, q: (p * (p / q).log()).sum(-1),
          "reverse KL": lambda p, q: (q * (q / p).log()).sum(-1),
          "total variation": lambda p, q: 1 - torch.minimum(p, q).sum(-1)}


@wrong("distill", "300 steps of Adam")
def stops_after_30_steps(p, contexts, loss):
    """30 steps."""
    return distilled(p, contexts, LOSSES[loss], steps=30)


@wrong("distill", "300 steps of Adam")
def stops_after_100_steps(p, contexts, loss):
    """100 steps."""
    return distilled(p, contexts, LOSSES[loss], steps=100)


@wrong("distill", "300 steps of Adam")
def goes_slowly(p, contexts, loss):
    """A learning rate of 0.01."""
    return distilled(p, contexts, LOSSES[loss], learning_rate=0.01)


@wrong("distill", "300 steps of Adam")
def starts_far_from_zeros(p, contexts, loss):
    """W starts as random numbers."""
    return distilled(p, contexts, LOSSES[loss], start=1.0)


@wrong("distill", "than the one trained for it")
def descends_without_adam(p, contexts, loss):
    """Plain gradient descent with the learning rate of Adam."""
    return distilled(p, contexts, LOSSES[loss], method=torch.optim.SGD)


@wrong("distill", "has less forward KL than the one trained for it")
def swaps_the_divergences(p, contexts, loss):
    """Forward and reverse KL are taken for one another."""
    other = {"forward KL": "reverse KL", "reverse KL": "forward KL"}
    return distilled(p, contexts, LOSSES[other.get(loss, loss)])


@wrong("distill", "the draft trained for total variation reaches")
def squares_the_differences(p, contexts, loss):
    """Squared differences for total variation."""
    losses = {**LOSSES, "total variation": lambda p, q: ((p - q) ** 2).sum(-1)}
    return distilled(p, contexts, losses[loss])


@wrong("distill", "has less reverse KL than the one trained for it")
def knows_one_loss(p, contexts, loss):
    """Forward KL, whatever was asked for."""
    return distilled(p, contexts, LOSSES["forward KL"])


@wrong("distill", "must be detached")
def keeps_the_graph(p, contexts, loss):
    """q still hangs on W and all of its graph."""
    return answers.distill(p, contexts, loss).requires_grad_()


@wrong("distill", "rows that sum to 1")
def returns_logits(p, contexts, loss):
    """The logits in place of the distribution."""
    return answers.distill(p, contexts, loss).log()


# ---------------------------------------------------------------- 10. a batch of texts

def filled_on_the_right(target, rows):
    """The logits of each text, from one pass over all."""
    width = max(map(len, rows))
    filled = [ids + [0] * (width - len(ids)) for ids in rows]
    return target(torch.tensor(filled, device=target.device))


def still_open(left):
    return [i for i, tokens in enumerate(left) if tokens > 0]


@torch.inference_mode()
def batched(target, proposes, texts, max_new, gamma, warp, choose, unfinished=still_open,
            drafter=lambda i, place: i, asked=lambda gamma, left: min(gamma, left - 1),
            logits_of=filled_on_the_right, first=lambda text: len(text) - 1, commit=lambda new: new,
            verify=verify_token):
    """The answer in parts. Each wrong answer has one other part."""
    whole = [list(text) for text in texts]
    left = [max_new] * len(texts)
    while open_texts := unfinished(left):
        drafts = [proposes[drafter(i, place)](whole[i], asked(gamma, left[i]), choose)
                  for place, i in enumerate(open_texts)]
        rows = [whole[i] + drafted.tolist() for i, (drafted, _) in zip(open_texts, drafts)]
        new = []
        for i, logits, (drafted, q) in zip(open_texts, logits_of(target, rows), drafts):
            start = first(whole[i])
            verdict = verify(warp(logits[start:start + len(drafted) + 1]), q, drafted, choose)
            new.append(drafted.tolist()[:int(verdict.n)] + [int(verdict.token)])
        for i, tokens in zip(open_texts, commit(new)):
            whole[i] += tokens
            left[i] -= len(tokens)
    return [text[len(given):len(given) + max_new] for text, given in zip(whole, texts)]


@wrong("speculative_batch", "3 drafts were asked for")
def drafts_past_the_end(*batch):
    """All of gamma is drafted, and what is too much is cut off at the end."""
    return batched(*batch, asked=lambda gamma, left: gamma)


@wrong("speculative_batch", "one a round for all, each text keeping all")
def cuts_to_the_fewest(*batch):
    """All texts keep as many tokens as the one that accepted the fewest: lossless, and slow."""
    return batched(*batch, commit=lambda new: [tokens[:min(map(len, new))] for tokens in new])


@wrong("speculative_batch", "one a round for all, each text keeping all")
def takes_a_pass_for_each_text(*batch):
    """The texts do not share the pass."""
    return batched(*batch, logits_of=lambda target, rows: [
        target(torch.tensor([ids], device=target.device))[0] for ids in rows])


@wrong("speculative_batch", "new tokens of three texts are")
def fills_up_on_the_left(*batch):
    """Short rows are filled up on the left, where every token of the text looks."""
    def logits_of(target, rows):
        width = max(map(len, rows))
        filled = [[0] * (width - len(ids)) + ids for ids in rows]
        logits = target(torch.tensor(filled, device=target.device))
        return [table[width - len(ids):] for table, ids in zip(logits, rows)]

    return batched(*batch, logits_of=logits_of)


@wrong("speculative_batch", "new tokens of three texts are")
def judges_by_the_end_of_the_row(*batch):
    """The last γ+1 rows judge, also where the row was filled up."""
    def logits_of(target, rows):
        logits = filled_on_the_right(target, rows)
        return [table[len(table) - len(ids):] for table, ids in zip(logits, rows)]

    return batched(*batch, logits_of=logits_of)


@wrong("speculative_batch", "new tokens of three texts are")
def judges_from_one_row_before(*batch):
    """The first draft is judged by the row of the token before the last."""
    return batched(*batch, first=lambda text: max(0, len(text) - 2))


@wrong("speculative_batch", "new tokens of three texts are")
def stops_with_the_first_text(*batch):
    """The batch ends when one text does."""
    return batched(*batch, unfinished=lambda left: range(len(left)) if min(left) > 0 else [])


@wrong("speculative_batch", "was drafted for once more")
def goes_on_with_finished_texts(*batch):
    """A text that is complete takes part until the slowest is."""
    return batched(*batch, unfinished=lambda left: range(len(left)) if max(left) > 0 else [])


@wrong("speculative_batch", "two texts in a batch")
def accepts_only_the_likeliest(*batch):
    """A draft stands if it is the target's likeliest token: right at temperature 0 alone."""
    def verify(p, q, drafted, choose):
        n = (p[:-1].argmax(-1) == drafted).cumprod(0).sum()
        return Verdict(n, choose(row(p, n)))

    return batched(*batch, verify=verify)


@wrong("speculative_batch", "texts that were given have been changed")
def writes_into_the_texts(target, proposes, texts, *rest):
    """The new tokens are added to the lists of the caller."""
    new = answers.speculative_batch(target, proposes, texts, *rest)
    for text, tokens in zip(texts, new):
        text += tokens
    return new


@wrong("speculative_batch", "new tokens of three texts are")
def returns_the_prompts_too(target, proposes, texts, *rest):
    """Whole texts in place of the new tokens."""
    new = answers.speculative_batch(target, proposes, texts, *rest)
    return [text + tokens for text, tokens in zip(texts, new)]


@wrong("speculative_batch", "was called for another text")
def mixes_up_the_drafters(*batch):
    """Once a text is complete, those behind it get their neighbour's drafter."""
    return batched(*batch, drafter=lambda i, place: place)
