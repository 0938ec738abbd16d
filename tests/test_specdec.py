"""specdec.py: what its loops tell, refuse, wait for and leave alone.

Models are real with random weights, or `Scripted` where a path has to be forced. That the loop is
Algorithm 1, that its text follows the target's law, and what the models read, is shown in law/.
"""

import contextlib
import copy
import functools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rigs import (DEVICE, EOS, Spy, decode, forbidden, greedy, our_rules, random_gpt, saying,
                  seeded)
from sampling import warp
from specdec import DraftModel, plain, speculative, uncached
from variants import prompt_lookup

both_drafters = pytest.mark.parametrize("make", [
    DraftModel, lambda draft, warp: prompt_lookup(9, DEVICE)], ids=["model", "lookup"])


# ---------------------------------------------------------------- what is told

@our_rules
def test_a_round_says_what_the_cache_held(verify):
    """Before the pass, after it, and after the rollback: all of the text but its last token."""
    length, target, draft = 3, random_gpt(9, 2, context=64), random_gpt(9, 1, 1, context=64)
    for one in decode(target, DraftModel(draft, warp), [1, 2, 3], 40, 4, verify, eos=8):
        held = length - 1 if length > 3 else 0
        assert one.cache == (held, length + len(one.drafts), length + len(one.new) - 1)
        length += len(one.new)


@our_rules
@pytest.mark.parametrize("target, draft, gamma, writers", [
    ((0, 9, 9, 9, 9), (0, 9, 9, 9, 9), 4, ["draft"]),
    ((7, 0, 9, 9, 9), (7, 0, 8, 8, 8), 4, ["draft"] * 2),
    ((7, 0, 9, 9, 9), (7, 9, 9, 9, 9), 4, ["draft", "correction"]),
    ((7, 0, 9, 9, 9), (7, 9, 9, 9, 9), 1, ["draft", "bonus"])])
def test_nothing_behind_an_end_of_text_counts(target, draft, gamma, writers, verify):
    (one,) = decode(saying(*target), DraftModel(saying(*draft), warp), [1], 9, gamma, verify,
                    eos=EOS)
    assert one.writers == writers and one.accepted == writers.count("draft")
    assert one.drafts == list(draft[:gamma]) and one.new == list(target[:len(writers)])


# ---------------------------------------------------------------- what is refused

@pytest.mark.parametrize("length, drafts", ((8, 4), (9, 4), (10, 3), (12, 1), (13, 0), (16, 0)))
def test_a_draft_model_drafts_up_to_the_end_of_its_context(length, drafts):
    """12 tokens are read at most, and the last draft is not."""
    drafted, q = DraftModel(random_gpt(9, context=12), greedy)([3] * length, 4, seeded())
    assert drafted.shape == (drafts,) and torch.equal(q, F.one_hot(drafted, 9).to(q.dtype))


@pytest.mark.parametrize("prompt, max_new, said", [
    ([0] * 10, 8, "16 has room for 17 tokens in all, and not for 10 of the prompt and 8 new ones"),
    ([0] * 18, 0, "context of 16"), ([], 1, "the prompt is empty")])
def test_a_text_that_does_not_fit_is_refused_before_work(prompt, max_new, said):
    target, way = Spy(random_gpt(context=16), forbidden), dict(warp=warp, choose=forbidden)
    for decoding in (plain(target, prompt, max_new, **way),
                     speculative(target, forbidden, prompt, max_new, gamma=4, **way)):
        with pytest.raises(ValueError, match=said):
            list(decoding)


def test_a_cache_that_was_not_rolled_back_is_said_to_be_so():
    cache = random_gpt().new_cache()
    assert uncached([1, 2, 3], cache, DEVICE).tolist() == [[1, 2, 3]]
    cache.length = 7
    with pytest.raises(ValueError, match="7 of 5 tokens.*rolled back"):
        uncached([1] * 5, cache, DEVICE)


@pytest.mark.parametrize("drafts, q, said", [
    (5, [[0.1] * 10] * 5, r"asked for 3 drafts, the drafter gave 5 with q of shape \(5, 10\)"),
    (3, [[0.1] * 10] * 2, r"gave 3 with q of shape \(2, 10\); p has the shape \(4, 10\)"),
    (1, [[0.0] * 10], "drafter's q is no distribution: its rows must sum to 1"),
    (1, [[0.099] * 10], "its rows must sum to 1"), (1, [[0.101] * 10], "its rows must sum to 1")])
def test_the_fault_of_a_drafter_is_named(drafts, q, said):
    def propose(tokens, gamma, choose):
        return torch.ones(drafts, dtype=torch.long, device=DEVICE), torch.tensor(q, device=DEVICE)

    with pytest.raises(ValueError, match=said):
        decode(saying(1), propose, [1], 9, 3)


def test_at_the_end_of_a_text_more_drafts_than_fit_are_refused():
    def propose(tokens, gamma, choose):
        return torch.ones(3, dtype=torch.long, device=DEVICE), torch.full((3, 10), 0.1).to(DEVICE)

    with pytest.raises(ValueError, match="asked for 1 drafts, the drafter gave 3"):
        decode(saying(1), propose, [1], 2, 3)


# ---------------------------------------------------------------- what waits, and what it costs

def test_no_pass_of_either_loop_is_recorded_for_gradients():
    modes = []
    target = Spy(random_gpt(), lambda held, ids: modes.append(torch.is_inference_mode_enabled()))
    list(plain(target, [1], 3, warp=warp, choose=seeded()))
    decode(target, DraftModel(random_gpt(), warp), [1], 3, 2)
    assert len(modes) >= 4 and all(modes)


class Operations(TorchDispatchMode):
    """What a device is given to do: all but views, and memory that is asked for."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        view = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        name = func.overloadpacket.__name__
        if not view and name not in ("detach_", "empty", "empty_like"):
            # By a mask: how much it takes has to be read.
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool
                     ] if name == "index" else []
            self.seen.append("nonzero" if masks else name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seen_of(monkeypatch):
    """work -> (what work() gives, its operations, and its copies to the host)"""
    seen = []

    def counted(name, method):
        return lambda *args, **options: seen.append(name) or method(*args, **options)

    for name in ("tolist", "cpu", "numpy"):  # they run below what Operations sees
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))

    def watched(work):
        seen.clear()
        with Operations(seen):
            return work(), list(seen)

    return watched


WAITS = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "tolist", "cpu", "numpy")


@pytest.mark.parametrize("reading", [
    torch.Tensor.item, bool, torch.nonzero, lambda one: one.tolist(), lambda one: one.cpu(),
    lambda one: one.view(1)[one.view(1) > 0], lambda one: torch.equal(one, one)])
def test_the_counter_of_reads_counts(reading, seen_of):
    with torch.inference_mode():
        _, seen = seen_of(lambda: reading(torch.tensor(1, device=DEVICE)))
    assert sum(name in WAITS for name in seen) == 1


@our_rules
@both_drafters
@pytest.mark.parametrize("setting", [{}, {"temperature": 0},
                                     {"temperature": 0.7, "top_k": 2, "top_p": 0.9}], ids=str)
def test_a_round_reads_from_the_device_once(setting, make, verify, seen_of):
    """The numbers come in one transfer, and are taken apart on the host."""
    target, draft, shape = random_gpt(9, 2), random_gpt(9, 1, 1), functools.partial(warp, **setting)
    way = dict(warp=shape, choose=seeded(), eos=8)
    for parts, work in (
            (2, lambda: list(plain(target, [1, 2, 1], 12, **way))),
            (5, lambda: decode(target, make(draft, shape), [1, 2, 1], 12, 4, verify, **way))):
        done, seen = seen_of(work)
        assert [one for one in seen if one in WAITS] == (["cpu"] + ["tolist"] * parts) * len(done)


def test_a_draft_step_has_at_most_23_operations(seen_of):
    """One layer, its softmax and its draw: where a device takes about as long for a small operation
    as for none, their number is the time."""
    def operations(gamma):
        propose, choose = DraftModel(random_gpt(9, dtype=torch.float32), warp), seeded()
        return len(seen_of(lambda: propose([1, 2, 3], gamma, choose))[1])

    assert operations(4) - operations(3) == operations(3) - operations(2) <= 23


# ---------------------------------------------------------------- what stays as it was

def global_states():
    states = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64)),
              torch.tensor(random.getstate()[1])]
    return states + (torch.cuda.get_rng_state_all() if DEVICE.type == "cuda" else [])


@our_rules
@both_drafters
@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
def test_no_input_mode_weight_or_global_random_state_changes(training, make, verify):
    """Also where a generator is stopped, or choose raises."""
    target, draft = random_gpt(9, 2).train(training), random_gpt(9, 1, 1).train(training)
    tokens = [1, 2, 1]
    given = [torch.full((n, 4), 0.25, device=DEVICE) for n in (4, 3)]
    verify(*given, torch.tensor([0, 1, 2], device=DEVICE), seeded())
    assert all((part == 0.25).all() for part in given)
    weights, states = copy.deepcopy([target.state_dict(), draft.state_dict()]), global_states()
    for choose, end in ((seeded(), contextlib.nullcontext()),
                        (forbidden, pytest.raises(AssertionError))):
        way = dict(warp=warp, choose=choose)
        for decoding in (plain(target, tokens, 9, **way),
                         speculative(target, make(draft, warp), tokens, 9, gamma=3, verify=verify,
                                     **way)):
            with end, contextlib.closing(decoding):
                next(decoding)
    assert tokens == [1, 2, 1] and not torch.is_inference_mode_enabled()
    assert all(map(torch.equal, states, global_states()))
    for model, kept in zip((target, draft), weights):
        assert all(one.training == training for one in model.modules())
        assert all(torch.equal(weight, kept[name]) for name, weight in model.state_dict().items())
        assert all(weight.grad is None for weight in model.parameters())
