"""What stands in for a step of the ladder that is not written yet: specdec.py, cut into steps.

They call one another by name, so that a step of a student's own can be put among them.
"""

import contextlib
from unittest import mock

import torch

import sampling
import variants
from exercises.grading import is_written
from programs import decode
from sampling import residual, verify_token
from specdec import DraftModel, Round, check_room

STEPS = ["residual", "verify_token", "feed", "commit", "DraftModel", "one_round", "speculative"]


def feed(tokens, length, drafts):
    ids = tokens[length:] + drafts
    return ids, list(range(len(ids) - len(drafts) - 1, len(ids)))


def commit(tokens, cache, drafts, n, token, eos):
    new = drafts[:n] + [token]
    if eos in new:
        new = new[:new.index(eos) + 1]
    tokens += new
    cache.length = len(tokens) - 1
    return new


def one_round(target, cache, propose, tokens, *, gamma, warp, choose, verify, eos):
    before = cache.length
    drafted, q = propose(tokens, gamma, choose)
    drafts = drafted.tolist()
    ids, rows = feed(tokens, before, drafts)
    p = warp(target(torch.tensor([ids], device=target.device), cache)[0, rows])
    after = cache.length
    n, token = verify(p, q, drafted, choose)
    new = commit(tokens, cache, drafts, int(n), int(token), eos)
    return Round(drafts, min(int(n), len(new)), new, (before, after, cache.length), p, q)


@torch.inference_mode()
def speculative(target, propose, tokens, max_new, *, gamma, warp, choose, verify, eos=None):
    check_room(target, tokens, max_new)
    tokens, cache = list(tokens), target.new_cache()
    end = len(tokens) + max_new
    while len(tokens) < end:
        one = one_round(target, cache, propose, tokens, gamma=min(gamma, end - len(tokens) - 1),
                        warp=warp, choose=choose, verify=verify, eos=eos)
        yield one
        if one.new[-1] == eos:
            return


# ---------------------------------------------------------------- among the steps of a student

def plug_in(student):
    """Let every program run on the steps of a student, and where one is not written on its
    stand-in. student: the names of the student's file. Returns the steps that are written."""
    mine = {name: student[name] for name in STEPS if is_written(student.get(name))}
    others = {name: globals()[name] for name in STEPS if name not in mine}
    globals().update(mine)
    student.update(others)
    sampling.residual = student["residual"]  # where verify_token looks for it
    variants.RULES["mine"] = student["verify_token"]
    variants.DRAFTERS["mine"] = lambda pair, warp: student["DraftModel"](pair.draft, warp)
    decode.speculative = student["speculative"]
    return list(mine)


@contextlib.contextmanager
def kept_as_it_was(student):
    """What is plugged in meanwhile is taken out again."""
    with contextlib.ExitStack() as stack:
        for names in (student, globals(), vars(sampling), vars(decode), variants.RULES,
                      variants.DRAFTERS):
            stack.enter_context(mock.patch.dict(names))
        yield
