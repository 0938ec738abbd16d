"""What each step of the ladder has to satisfy: a check for each, which is given the step.

A step runs among the stand-ins of all others, on models that tell what they read, and over every
way that the draws can fall. Where what came is just what a well-known mistake gives, it is named.
"""

import functools
import itertools
import math
from types import SimpleNamespace
from unittest import mock

import torch

from exact import marginal
from exercises import stand_ins
from exercises.grading import (DEVICE, Reader, case, check_drafts, check_law, close, graded,
                               is_tensor, kind, law, numbers, on_copies, parts, random_table,
                               require, same, same_law, table)
from sampling import residual, verify_token, warp
from specdec import DraftModel, Round, algorithm_1

P = table([0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.35, 0.4])
Q = table([0.25, 0.6, 0.15], [0.48, 0.28, 0.24])
PROMPT = [0, 1]
# The warp of the target and of the draft model. With these neither is a softmax, and the two models
# are similar where their logits are the same.
cool, hot = (functools.partial(warp, temperature=t) for t in (0.75, 1.5))


def likeliest(probs):
    return probs.argmax(-1)


def one_hot(probs):
    return torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1)


# ---------------------------------------------------------------- 1. what q leaves of p

def check_residual(answer):
    for words, p, q in [
            ("one row", P[0], Q[0]), ("a one-hot q", P[0], table(0, 1, 0)),
            ("a p that equals q, so that nothing is left", P[0], P[0]), ("two rows", P[:2], Q),
            ("a p that is close to q", P[0], P[0] + table(-0.5, 0.5, 0) / 1e9),
            ("two rows, of which one has p = q", P[:2], torch.stack([P[0], Q[1]]))]:
        with case(f"for {words}"):
            came, left = on_copies(answer, p, q), (p - q).clamp(min=0)
            is_tensor("what it leaves", came, tuple(p.shape), torch.float64)
            for row, right, *of in zip(*(x.view(-1, 3) for x in (
                    came, residual(p, q), p, q, left, left / left.sum()))):
                check_left(row, right, *of)


def check_left(row, right, p, q, left, over_all):
    same_law(f"of p = {numbers(p)} and q = {numbers(q)} it leaves", row, right, {
        "nothing is left, and 0 / 0 is NaN: then the row is p": left / left.sum(),
        "it is not divided by its sum": left, "that is p": p, "that is q - p": residual(q, p),
        "what is below 0 is to be cut off, not made positive": (p - q).abs() / (p - q).abs().sum(),
        "it is divided by the sum of all rows, not of its own": over_all,
        "p - q sums to 0, cut off what is below 0 first": (p - q) / (p - q).sum()})


# ---------------------------------------------------------------- 2. the rule

def check_verify_token(answer):
    check_rule(answer, P, Q, list(itertools.product(range(3), repeat=2)))
    for words, p, q, run in [
            ("no drafts at all", P[:1], Q[:0], ()), ("a draft that p forbids", table(
                [0.5, 0, 0.5], *P[1:].tolist()), Q, (1, 0)),
            ("a draft that p likes a little less than q does",
             table([0.3, 0.597, 0.103], *P[1:].tolist()), Q, (1, 0)),
            ("a draft that p hardly likes", table([0.9999, 0.0001, 0], *P[1:].tolist()), Q, (1, 0)),
            ("more drafts than there are tokens", random_table(5, 3).softmax(-1),
             random_table(4, 3, seed=1).softmax(-1), (1, 0, 2, 0)),
            ("copied drafts, and so a one-hot q", P, table([0, 1, 0], [1, 0, 0]), (1, 0))]:
        with case(f"with {words}"):
            check_rule(answer, p, q, [run])


def check_rule(answer, p, q, runs):
    """runs: each the drafts of a round, (k,). First how many stand, of each; then what follows."""
    k, laws = len(q), [law(lambda choose: run_rule(answer, p, q, run, choose)) for run in runs]
    stands = table(*([sum(w for (m, _), w in law.items() if m == n) for n in range(k + 1)]
                     for law in laws))  # (runs, k+1)
    causes = [words for words, gives in mistaken_stands(p, q, runs).items() if close(stands, gives)]
    for run, came in zip(runs, stands):
        same_law(f"of the drafts {list(run)} there stand 0 to {k} with the probabilities", came,
                 stand(p, q, run), {words: came for words in causes})
    for n in range(k + 1):
        token = table(*(sum(law.get((n, x), 0) for law in laws) for x in range(3)))
        if token.sum() > 0:
            next_one = ", the next one rejected," * (n < k)
            same_law(f"after {n} accepted drafts{next_one} the token has the law",
                     token / token.sum(), p[n] if n == k else residual(p[n], q[n]),
                     (mistaken_bonus if n == k else mistaken_correction)(p, q, n))


def run_rule(answer, p, q, drafted, choose):
    """(n, token) as numbers, after a look at what they are."""
    ids = torch.tensor(drafted, dtype=torch.long, device=DEVICE)  # (k,)
    result = parts(on_copies(answer, p, q, ids, choose), "n", "token")
    for name, value in zip(("n", "token"), result):
        is_tensor(name, value, (), torch.long)
    return tuple(map(int, result))


def ratio(p, q, i, x):
    return min(1.0, float(p[i, x] / q[i, x]))


def stand(p, q, run, coin=ratio):
    """[P(n = 0), ..., P(n = k)] where coins are tossed up to the first 0. coin(p, q, i, x): the
    probability that draft i, the token x, stands."""
    law = [1.0]
    for chance in [float(coin(p, q, i, x)) for i, x in enumerate(run)]:
        law[-1:] = [law[-1] * (1 - chance), law[-1] * chance]
    return law


def mistaken_stands(p, q, runs):
    """{usual cause: the probabilities of 0 to k that stand, (runs, k+1)}."""
    coins = {
        "the coin is q/p; it has to be p/q": lambda p, q, i, x: ratio(q, p, i, x),
        "the rows are shifted by one: row i of p judges draft i":
            lambda p, q, i, x: ratio(p[1:], q, i, x),
        "the coin is p(x); it has to be p(x) / q(x)": lambda p, q, i, x: p[i, x],
        "the coin is used the wrong way round": lambda p, q, i, x: 1 - ratio(p, q, i, x),
        "no coin is tossed, and a draft with p(x) < q(x) may stand too":
            lambda p, q, i, x: p[i, x] >= q[i, x],
        "it asks for the target's likeliest token": lambda p, q, i, x: p[i].argmax() == x}
    laws = {words: [stand(p, q, run, coin) for run in runs] for words, coin in coins.items()}
    counted = [[0.0] * (len(q) + 1) for _ in runs]
    for law, run in zip(counted, runs):
        for ups in itertools.product((0, 1), repeat=len(q)):
            law[sum(ups)] += math.prod(ratio(p, q, i, x) if up else 1 - ratio(p, q, i, x)
                                       for up, (i, x) in zip(ups, enumerate(run)))
    return laws | {"coins behind the first rejection are counted": counted}


def mistaken_correction(p, q, n):
    return {
        "the correction comes from p, and not from the residual": p[n],
        "the correction comes from q": q[n],
        "the correction comes from q - p": residual(q[n], p[n]),
        "the residual takes row n-1 of q": residual(p[n], q[n - 1]),
        "it is the likeliest token, not a draw": one_hot(residual(p[n], q[n])),
        "the correction is drawn from the last row of p, as if it were the bonus": p[-1],
        "the residual is that of row 0": residual(p[0], q[0]),
        "the rows are shifted by one: the residual takes row n+1 of p": residual(p[n + 1], q[n])}


def mistaken_bonus(p, q, n):
    likeliest = {"it is the likeliest token, not a draw": one_hot(p[n])}
    return likeliest if n == 0 else likeliest | {
        "the bonus comes from row n-1; it is for the last row of p": p[n - 1],
        "the bonus comes from row 0; it is for the last row of p": p[0],
        "the bonus comes from a residual, but nothing was rejected": residual(p[n - 1], q[n - 1])}


# ---------------------------------------------------------------- 3. one pass judges all

def check_feed(answer):
    text = [5, 3, 8, 2]
    for length, drafts in [(0, [7, 1]), (3, [7, 1, 1]), (3, []), (0, []), (2, [4])]:
        with case(f"text {text}, of which the cache holds {length} tokens, drafts {drafts}"):
            given = list(text), list(drafts)
            ids, rows = parts(answer(given[0], length, given[1]), "ids", "rows")
            same("what it was given", given, (text, drafts))
            for name, value in (("ids", ids), ("rows", rows)):
                require(isinstance(value, list), f"{name} is {kind(value)}; right is a list")
            new = text[length:]
            same("ids", ids, new + drafts, {
                str(drafts): "the text's last token is missing, whose row judges draft 0",
                str(text + drafts): "what the cache holds is not to be read again",
                str(new + drafts[:-1]): "the last draft is missing, whose row is for the bonus",
                str(new): "the drafts are missing"})
            right = list(range(len(new) - 1, len(ids)))
            same("rows", rows, right, {
                str([row - len(ids) for row in right]): "they are counted from the end",
                str([row + 1 for row in right]): "shifted by one, a row is of what comes AFTER it",
                str([row + length for row in right]): "they are counted from the first id read",
                str(right[:-1]): "the row for the bonus is missing",
                str(right[1:]): "the row that judges draft 0 is missing, of the text's last token",
                str(list(range(len(ids)))): "the rows of the text before judge nothing"})


# ---------------------------------------------------------------- 4. the end of a round

def check_commit(answer):
    drafts = [7, 0, 4]
    for words, drafts, n, token, eos in [
            ("all of the drafts [7, 0, 4] accepted", drafts, 3, 6, None),
            ("one accepted", drafts, 1, 6, None), ("none accepted", drafts, 0, 6, 9),
            ("no drafts", [], 0, 6, None),
            ("an end of text, 9, that is the token", drafts, 1, 9, 9),
            ("an end of text, 0, that is an accepted draft", drafts, 3, 6, 0),
            ("an end of text, 7, that is the first draft", drafts, 3, 6, 7),
            ("two ends of text, 0, that are accepted", [7, 0, 4, 0], 4, 6, 0),
            ("an end of text, 4, that is a rejected draft", drafts, 1, 6, 4),
            ("an end of text, 3, that stands in the text before", drafts, 1, 6, 3)]:
        with case(words):
            check_committed(answer, [5, 3, 8], drafts, n, token, eos)


def check_committed(answer, text, drafts, n, token, eos):
    whole, tokens, given, read = drafts[:n] + [token], list(text), list(drafts), len(text + drafts)
    right = whole[:whole.index(eos) + 1] if eos in whole else whole
    cache = SimpleNamespace(length=read)
    same("new", answer(tokens, cache, given, n, token, eos), right, {
        str(right[:-1]): "its last token is missing", str(text + right): "that is the whole text",
        str(drafts + [token]): "rejected drafts join nothing",
        str(whole): "nothing joins behind an end of text"})
    same("the list of drafts", given, drafts)
    same("the list tokens", tokens, text + right, {
        str(text): "add to the caller's own list, as += does"})
    end = len(tokens) - 1
    same(f"the text is {tokens} and the length of the cache", cache.length, end, {
        str(end - 1): "one too short, a token would be read twice",
        str(read): "it is not rolled back, and holds what is not of the text",
        str(len(text) + n): "it is rolled back to the accepted drafts, and the text ended earlier",
        str(end + 1): "one too long, no pass has read the text's last token"})


# ---------------------------------------------------------------- 5. the draft model

def check_draft_model(answer):
    check_reading(answer)
    model, text = Reader(2, 3), [0, 1]
    check_drafts(lambda choose: draft(answer(model, hot), text, 2, choose, 2),
                 lambda drafts: hot(model.after(text + drafts)))
    for gamma, context, length, right in [
            (0, 16, 3, 0), (4, 16, 3, 4), (4, 5, 4, 2), (4, 5, 6, 0), (1, 5, 5, 1)]:
        with case(f"gamma {gamma}, a text of {length} tokens, a context of {context}"):
            model = Reader(2, 3, context)
            draft(answer(model, warp), [0, 1, 0, 0, 1, 0][:length], gamma, likeliest, right)


def draft(drafter, text, gamma, choose, right):
    """(drafted, q), after a look at what they are. right: how many drafts there should be."""
    given = list(text)
    drafted, q = parts(drafter(given, gamma, choose), "drafted", "q")
    same("the caller's list, tokens,", given, text)
    is_tensor("drafted", drafted, (right,), torch.long)
    is_tensor("q", q, (right, 3), torch.float64 if right else q.dtype)
    return drafted, q


def check_reading(answer):
    """What the model reads in six calls, from the text as it grows."""
    model = Reader(2, 3)
    draft(answer(model, warp), [2, 1, 1], 2, likeliest, 2)  # another text, of which nothing is left
    drafter, text, held, drafts = answer(model, warp), [2, 0, 1], 0, []
    for when, stands in [("in its first call", 0), ("after two accepted drafts", 2),
                         ("after one accepted draft of two", 1), ("after two rejected drafts", 0)]:
        if drafts:
            held = len(text) + min(stands, 1)  # the second draft was never read
            text = text + drafts[:stands] + [(drafts[stands] + 1) % 3 if stands < 2 else 2]
        with case(f"{when}, the text being {text}"):
            model.passes.clear()
            drafts = draft(drafter, text, 2, likeliest, 2)[0].tolist()
            check_passes("the draft model", model.passes,
                         [(text[:held], text[held:]), (text, drafts[:1])])
    held, text = len(text), text + [(drafts[0] + 1) % 3]
    for when, gamma in [("in a call for no drafts", 0), ("in the next call after it", 1)]:
        with case(f"{when}, the text being {text}"):
            model.passes.clear()
            draft(drafter, text, gamma, likeliest, gamma)
            check_passes("the draft model", model.passes, [(text[:held], text[held:])] * gamma)
        text = text + [1]


def check_passes(who, came, right):
    """came, right: of each pass what the cache held, and what was read behind it."""
    require(len(came) == len(right), f"{who} ran {len(came)} times; right is {len(right)}"
            + ": the last draft need not be read" * (len(right) == len(came) - 1 > 1))
    for (held, read), (right_held, right_read) in zip(came, right):
        text, cause = right_held + right_read, ""
        if held + read == text:
            cause = ": what the cache could have kept is read again"
        elif held != text[:len(held)] or len(held) > len(right_held):
            cause = ": the cache holds what is not of the text, was it rolled back?"
        elif read == text[len(text) - len(read):]:
            cause = ": that leaves a hole, a token between them was never read"
        require((held, read) == (right_held, right_read), f"{who} read {read} behind {held}; right "
                f"is {right_read} behind {right_held}{cause}")


# ---------------------------------------------------------------- 6 to 8. rounds, loop, all of it

def check_one_round(answer):
    with mock.patch.dict(vars(stand_ins), one_round=answer):
        check_speculative(stand_ins.speculative)


def check_together(student):
    """All that is written, in one, as the programs run it."""
    with stand_ins.kept_as_it_was(student):
        stand_ins.plug_in(student)
        check_speculative(student["speculative"], student["DraftModel"], student["verify_token"])


def check_speculative(loop, make=DraftModel, rule=verify_token, new=4):
    """The law of the text, the passes that it takes, and the joint law of accepted drafts and
    tokens are those of Algorithm 1, again and again."""
    target, draft = Reader(1), Reader(1)
    for most, passes in [(3, 2), (1, 4), (0, 7)]:
        with case(f"the target as its own draft model, so that all is accepted, with {most} drafts"
                  " or fewer where 3 are asked for"):
            own = make(draft, cool)
            rounds = write(loop, target, lambda tokens, gamma, choose: own(
                tokens, min(gamma, most), choose), rule, 7, 3, likeliest, None)
            require(len(rounds) == passes, f"7 tokens took {len(rounds)} passes; right is {passes}:"
                    " does the draft model read the text as it is, and its logits go through warp?")
    with case("a rule by which no draft stands, and whose own token may be what the draft was"):
        rounds = write(loop, target, make(draft, cool), lambda p, q, drafted, choose: (
            torch.tensor(0, device=DEVICE), choose(p[0])), 4, 2, likeliest, None)
        same("`accepted` of the Rounds", [accepted for accepted, _ in rounds], [0] * 4)
    with case("max_new 0"):
        require(write(loop, target, make(draft, cool), rule, 0, 3, likeliest, None) == (),
                "a round came; right is none")
    for gamma, eos in [(2, None), (1, None), (2, 0), (2, 1)]:
        came = law(lambda choose: write(loop, target, make(draft, hot), rule, new, gamma, choose,
                                        eos))
        right = law(lambda choose: algorithm_1_again(target, new, gamma, choose, eos))
        texts = [marginal(rounds, lambda rounds: sum((new for _, new in rounds), ()))
                 for rounds in (came, right)]
        check_law(*texts, f"with end of text {eos} the text")
        passes = [sum(len(rounds) * w for rounds, w in of.items()) for of in (came, right)]
        require(close(*passes), f"the text has the right law, but takes {passes[0]:.4f} passes on "
                f"average; right is {passes[1]:.4f}: does the draft model read the text as it is?")
        check_law(came, right, "the rounds, each told as (drafts accepted, new tokens),")


def algorithm_1_again(target, new, gamma, choose, eos):
    p, q = (lambda text, warp=warp: warp(target.after(text)) for warp in (cool, hot))
    tokens, rounds = list(PROMPT), []
    while (left := len(PROMPT) + new - len(tokens)) and not (rounds and tokens[-1] == eos):
        came = algorithm_1(p, q, tokens, min(gamma, left - 1), choose)
        cut = came[:came.index(eos) + 1] if eos in came else came
        rounds.append((min(len(came) - 1, len(cut)), tuple(cut)))
        tokens += cut
    return tuple(rounds)


def write(loop, target, propose, rule, new, gamma, choose, eos):
    """The rounds of a text, each told as (drafts accepted, new tokens), after a look at each."""
    prompt, text, rounds, came, judged = list(PROMPT), list(PROMPT), [], [], []

    def drafter(tokens, asked, choose):
        left = len(PROMPT) + new - len(tokens)
        require(len(judged) == len(rounds), f"round {len(rounds) + 2} began before round "
                f"{len(rounds) + 1} came: yield each Round as soon as it is there")
        same("the text that propose was given", tokens, text)
        same(f"with {left} tokens to go the number of drafts asked for", asked,
             min(gamma, left - 1), {str(min(gamma, left)): "a round adds one of the target's own"})
        return propose(tokens, asked, choose)

    def judge(p, q, drafted, choose):
        judged.append((p, q))
        drafts, held = drafted.tolist(), len(text) - 1 if rounds else 0
        with case(f"round {len(rounds) + 1}, after the text {text} with the drafts {drafts}"):
            check_passes("the target", target.passes, [(text[:held], text[held:] + drafts)])
            check_p(p, torch.stack([target.after(text + drafts[:i])
                                    for i in range(len(drafts) + 1)]))
        return rule(p, q, drafted, choose)

    for one in loop(target, drafter, prompt, new, gamma=gamma, warp=cool, choose=choose,
                    verify=judge, eos=eos):
        require(isinstance(one, Round), f"{kind(one)} came for a round; right is a Round")
        require(len(judged) == len(rounds) + 1, f"in round {len(rounds) + 1} verify was not called "
                "once: it is the rule that is asked for, and need not be the token rule")
        require(all(type(x) is int for x in [one.accepted, *one.new]), "`accepted` and `new` of "
                f"the Round are {one.accepted} and {one.new}; right are numbers, no tensors")
        with case(f"round {len(rounds) + 1}, after the text {text} with the drafts {one.drafts}"):
            held, read = len(text) - 1 if rounds else 0, len(text + one.drafts)
            require(torch.equal(one.p, judged[-1][0]) and torch.equal(one.q, judged[-1][1]),
                    "`p` and `q` of the Round are not those that verify was given")
            text += one.new
            same("`cache` of the Round", tuple(one.cache), (held, read, len(text) - 1), {
                str((held, held, len(text) - 1)): "was the cache given to the target?"})
            same("`accepted` of the Round", one.accepted, min(one.accepted, len(one.new)), {
                str(one.accepted): "a draft behind an end of text does not count"})
        target.passes.clear()
        rounds.append((one.accepted, tuple(one.new)))
        came = text[len(PROMPT):]
        require(eos not in came[:-1], f"the new tokens are {came}: none may come behind {eos}, an "
                "end of text")
        require(len(came) <= new, f"{len(came)} new tokens came, one too many: max_new is {new}")
    same("the caller's list, of which a copy is to grow,", prompt, PROMPT)
    require(len(came) == new or eos in came[-1:],
            f"the text ended after {len(came)} of {new} tokens")
    return tuple(rounds)


def check_p(p, logits):
    right = cool(logits)
    same("the shape of p, a row for each draft and one for the bonus,", tuple(p.shape),
         tuple(right.shape))
    for i, row in enumerate(p):
        same_law(f"row {i} of p is", row, right[i], {
            "these are logits, warp makes them a distribution": logits[i],
            "that is the softmax of the logits, and warp is asked for": logits[i].softmax(-1),
            "the rows are shifted by one": right[(i + 1) % len(right)]})


CHECKS = dict(zip(stand_ins.STEPS, (
    check_residual, check_verify_token, check_feed, check_commit, check_draft_model,
    check_one_round, check_speculative)))


def grade(name, student, seconds=60):
    """None where a step stands, and a sentence where it does not. student: names of the file."""
    if name == "together":
        return graded("the ladder as a whole", check_together, student, seconds)
    others = {other: getattr(stand_ins, other) for other in stand_ins.STEPS if other != name}
    with mock.patch.dict(student, others):
        return graded(name, CHECKS[name], student[name], seconds)
