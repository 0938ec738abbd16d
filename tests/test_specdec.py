"""specdec.py: what its loops read, ask, refuse and leave alone.

Models are real with random weights, or `Scripted` where a path has to be forced. That the text
follows the target's law is shown in law/.
"""

import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import specdec
from exact import EXACT, check_law, expectation, law
from rigs import (DEVICE, EOS, PROMPT, WAYS, Scripted, Spy, autoregressive_law, forbidden,
                  from_texts, greedy, identity_rig, our_rules, random_gpt, saying, seeded, text)
from sampling import verify_token, warp
from specdec import DraftModel, Round, algorithm_1, plain, speculative, unread
from variants import prompt_lookup

DRAFTERS = {"model": DraftModel, "lookup": lambda draft, warp: prompt_lookup(9, DEVICE)}
both_drafters = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())


def decode(target, propose, tokens, max_new, gamma, verify=verify_token, shape=warp, eos=None,
           seed=0):
    return list(speculative(target, propose, tokens, max_new, gamma=gamma, warp=shape,
                            choose=seeded(seed), verify=verify, eos=eos))


# ---------------------------------------------------------------- the idea

def test_algorithm_1_gives_accepted_drafts_and_one_token_more():
    def certain(*script):
        return lambda tokens: F.one_hot(torch.tensor(script[len(tokens) - 1]), 10).double()

    p, tokens = certain(1, 2, 3, 4), [0]
    choose = seeded() if DEVICE.type == "cpu" else lambda probs: probs.argmax(-1)
    assert algorithm_1(p, p, tokens, 3, choose) == [1, 2, 3, 4] and tokens == [0]
    assert algorithm_1(p, certain(1, 7, 3, 4), tokens, 3, choose) == [1, 2]
    assert algorithm_1(p, forbidden, tokens, 0, choose) == [1]


def test_expected_rejections_are_the_sum_of_total_variations():
    """Yin et al. 2024 (arXiv 2411.00841): E[rejections in T tokens] = sum over t of E TV(p_t, q_t).

    gamma is T, so that only a rejection ends a round before T tokens, and each of them is tested.
    The one after them is the target's own in any case.
    """
    T, way = 3, WAYS["T=1"]
    p, q = (from_texts(model, warp, PROMPT) for model in (way.target, way.draft))

    def rejections(choose):
        rounds = speculative(way.target, DraftModel(way.draft, warp), PROMPT, T + 1, gamma=T,
                             warp=warp, choose=choose)
        return sum(one.writers.count("correction") for one in rounds)

    right = sum(weight * sum(abs(a - b) for a, b in zip(p(tokens), q(tokens))) / 2
                for t in range(T)
                for tokens, weight in autoregressive_law(way.target, PROMPT, t, warp).items())
    assert abs(expectation(rejections) - right) < EXACT


# ---------------------------------------------------------------- what is asked, and what is read

def test_a_drafter_is_asked_for_gamma_and_at_most_one_fewer_than_are_left():
    asked = []

    def propose(tokens, gamma, choose):
        asked.append(gamma)
        return DraftModel(saying(5), warp)(tokens, gamma, choose)

    decode(saying(5), propose, [5], 9, 4)
    assert asked == [4, 3]
    assert decode(saying(5), forbidden, [5], 0, 4) == []
    assert list(plain(saying(5), [5], 0, warp=warp, choose=forbidden)) == []


def test_plain_decoding_reads_each_token_once():
    seen = []
    target = Spy(random_gpt(9), lambda held, ids: seen.append((held, len(ids))))
    list(plain(target, [1, 2, 3], 5, warp=warp, choose=seeded()))
    assert seen == [(0, 3), (3, 1), (4, 1), (5, 1), (6, 1)]


@our_rules
def test_a_round_says_what_the_cache_held(verify):
    """Before the pass, after it, and after the rollback: all of the text but its last token."""
    length, target, draft = 3, random_gpt(9, 2, context=64), random_gpt(9, 1, 1, context=64)
    for one in decode(target, DraftModel(draft, warp), [1, 2, 3], 40, 4, verify, eos=8):
        before = length - 1 if length > 3 else 0
        length += len(one.new)
        assert one.cache == (before, length - len(one.new) + len(one.drafts), length - 1)


def test_the_draft_cache_has_no_hole_after_a_full_acceptance():
    target, draft = identity_rig(vocab_size=9, n_layer=2, context=64)
    prompt = [3, 1, 4, 1, 5]
    rounds = decode(target, DraftModel(draft, warp), prompt, 40, 4)
    assert len(rounds) == 8 and all(one.accepted == len(one.drafts) for one in rounds)
    with torch.inference_mode():
        fresh = warp(draft(torch.tensor([[*prompt, *text(rounds)]], device=DEVICE))[0])
    for i, one in enumerate(rounds):
        assert (one.q - fresh[4 + 5 * i:][:len(one.q)]).abs().max() < 1e-10


def test_texts_in_turn_share_no_cache():
    """Every draft of an identity rig is accepted, as long as each drafter has a cache of its own."""
    target, draft = identity_rig(vocab_size=9, n_layer=2, context=64)
    texts = [speculative(target, DraftModel(draft, warp), prompt, 24, gamma=4, warp=warp,
                         choose=seeded()) for prompt in ([3, 1, 4], [1, 5, 2, 6, 5])]
    for one, other in zip(*texts, strict=True):
        assert one.accepted == len(one.drafts) and other.accepted == len(other.drafts)


# ---------------------------------------------------------------- what a round tells

@our_rules
@pytest.mark.parametrize("target, draft, gamma, writers", [
    ((0, 9, 9, 9, 9), (0, 9, 9, 9, 9), 4, ["draft"]),
    ((7, 7, 7, 0, 9), (7, 7, 7, 0, 9), 4, ["draft"] * 4),
    ((7, 0, 9, 9, 9), (7, 0, 8, 8, 8), 4, ["draft"] * 2),
    ((7, 0, 9, 9, 9), (7, 9, 9, 9, 9), 4, ["draft", "correction"]),
    ((7, 0, 9, 9, 9), (7, 9, 9, 9, 9), 1, ["draft", "bonus"])])
def test_nothing_behind_an_end_of_text_counts(target, draft, gamma, writers, verify):
    (one,) = decode(saying(*target), DraftModel(saying(*draft), warp), [1], 9, gamma, verify,
                    eos=EOS)
    assert one.writers == writers and one.accepted == writers.count("draft")
    assert one.drafts == list(draft[:gamma]) and one.new == list(target[:len(writers)])


def test_a_clipped_last_round_is_told_as_it_was():
    """7 new tokens with gamma 4: 5 drafted, 5 accepted, 2 passes."""
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    rounds = decode(target, DraftModel(draft, warp), [1], 7, 4)
    assert [(len(one.drafts), one.accepted, len(one.new)) for one in rounds] == [(4, 4, 5), (1, 1, 2)]


@our_rules
def test_a_draft_that_is_always_wrong_costs_speed_alone(verify):
    rounds = decode(saying(6), DraftModel(saying(5), warp), [1], 8, 4, verify)
    assert [(one.accepted, one.new) for one in rounds] == [(0, [6])] * 8


def test_a_round_shows_p_and_q():
    target, draft = Scripted([[0.6, 0.3, 0.1]]), Scripted([[0.3, 0.5, 0.2]])
    one = decode(target, DraftModel(draft, warp), [0], 9, 2)[0]
    assert one.p.cpu().numpy() == pytest.approx(np.array([[0.6, 0.3, 0.1]] * 3))
    assert one.q.cpu().numpy() == pytest.approx(np.array([[0.3, 0.5, 0.2]] * 2))
    assert Round([0, 1, 2, 0], 1, [0, 2], (), None, None).writers == ["draft", "correction"]


@our_rules
@pytest.mark.parametrize("setting, right", [
    (dict(top_k=2), [0.625, 0.375, 0]), (dict(top_p=0.7), [0.625, 0.375, 0]),
    (dict(temperature=0), [1, 0, 0]), (dict(temperature=0.5), [25 / 38, 9 / 38, 4 / 38])], ids=str)
def test_the_text_follows_the_target_that_was_warped_as_the_draft_was(setting, right, verify):
    target, draft = Scripted([[0.5, 0.3, 0.2]]), Scripted([[0.4, 0.35, 0.25]])
    shape = functools.partial(warp, **setting)
    found = law(lambda choose: text(speculative(
        target, DraftModel(draft, shape), [0], 2, gamma=1, warp=shape, choose=choose,
        verify=verify))[0])
    check_law(found, dict(enumerate(right)), "token {}")


@our_rules
def test_greedy_text_is_the_same_with_and_without_speculation(verify):
    """Random weights put logits close together. In float64 a difference of shape or order never
    decides."""
    for seed in range(30):
        target, draft = (random_gpt(9, 2, one, spread=0.3) for one in (seed, seed + 1000))
        right = tuple(plain(target, [seed % 9], 15, warp=greedy, choose=seeded()))
        for make in DRAFTERS.values():
            found = decode(target, make(draft, greedy), [seed % 9], 15, 4, verify, greedy)
            assert text(found) == right


# ---------------------------------------------------------------- the edge of the context

@pytest.mark.parametrize("make, context", [(DraftModel, 16), (DraftModel, 12), (DraftModel, 4),
                                           (DRAFTERS["lookup"], 16)])
def test_a_text_may_fill_the_context_to_the_last_token(make, context):
    """17 positions are named and 16 are read: the last token of a text is never read."""
    target, prompt = random_gpt(9, n_layer=2, context=16), [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]
    propose = make(random_gpt(9, n_layer=2, context=context), greedy)
    right = tuple(plain(target, prompt, 7, warp=greedy, choose=seeded()))
    assert text(decode(target, propose, prompt, 7, 4, shape=greedy)) == right


@pytest.mark.parametrize("length, drafts", ((8, 4), (9, 4), (10, 3), (12, 1), (13, 0), (16, 0)))
def test_a_draft_model_drafts_up_to_the_end_of_its_context(length, drafts):
    """12 tokens are read at most, and the last draft is not."""
    drafted, q = DraftModel(random_gpt(9, context=12), greedy)([3] * length, 4, seeded())
    assert drafted.shape == (drafts,) and q.shape == (drafts, 9)
    assert torch.equal(q, F.one_hot(drafted, 9).to(q.dtype))


@pytest.mark.parametrize("prompt, max_new, said", [
    ([0] * 10, 8, "context of 16 has room for 17 tokens in all, and not for 10 of the prompt and 8"),
    ([0] * 18, 0, "context of 16"), ([], 1, "the prompt is empty")])
def test_a_text_that_does_not_fit_is_refused_before_work(prompt, max_new, said):
    target = Spy(random_gpt(context=16), forbidden)
    way = dict(warp=warp, choose=forbidden)
    for decoding in (plain(target, prompt, max_new, **way),
                     speculative(target, forbidden, prompt, max_new, gamma=4, **way)):
        with pytest.raises(ValueError, match=said):
            list(decoding)


# ---------------------------------------------------------------- what a message says

def test_a_cache_that_was_not_rolled_back_is_said_to_be_so():
    cache = random_gpt().new_cache()
    assert unread([1, 2, 3], cache, DEVICE).tolist() == [[1, 2, 3]]
    cache.length = 7
    with pytest.raises(ValueError, match="the cache holds 7 tokens of a text of 5.*rolled back"):
        unread([1] * 5, cache, DEVICE)


@our_rules
@pytest.mark.parametrize("drafts, q, said", [
    (5, [[0.1] * 10] * 5, r"asked for 3 drafts, the drafter gave 5 with q of shape \(5, 10\)"),
    (3, [[0.1] * 10] * 2, r"gave 3 with q of shape \(2, 10\); p has the shape \(4, 10\)"),
    (3, [[0.125] * 8] * 3, r"q of shape \(3, 8\)"), (1, [[0.0] * 10], "rows must sum to 1"),
    (1, [[math.nan] * 10], "rows must sum to 1")])
def test_the_drafters_fault_is_named(drafts, q, said, verify):
    def propose(tokens, gamma, choose):
        return torch.ones(drafts, dtype=torch.long, device=DEVICE), torch.tensor(q, device=DEVICE)

    with pytest.raises(ValueError, match=said):
        decode(saying(1), propose, [1], 9, 3, verify)


def test_nan_in_the_target_is_named():
    target = Scripted([[math.nan, 1]])
    with pytest.raises(ValueError, match="the target's logits are NaN"):
        list(plain(target, [0], 1, warp=warp, choose=seeded()))
    with pytest.raises(ValueError, match="the target's logits are NaN"):
        decode(target, DraftModel(Scripted([[1, 1]]), warp), [0], 9, 2)


# ---------------------------------------------------------------- what waits, and what it costs

class Operations(TorchDispatchMode):
    """What a device is given to do: all but views, and memory that is asked for."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        view = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        name = func.overloadpacket.__name__
        if not view and name not in ("detach_", "empty", "empty_like"):
            masked = name == "index" and any(i is not None and i.dtype == torch.bool
                                             for i in args[1])  # its size has to be read
            self.seen.append("nonzero" if masked else name)
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """The methods that copy a tensor to the host: they run below what Operations sees."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "tolist", "cpu", "numpy"}


def seen_of(work):
    """(what work() gives, the names of its operations and copies)"""
    seen = []
    with Operations(seen), Copies(seen):
        return work(), seen


@pytest.mark.parametrize("reading", [
    torch.Tensor.item, bool, int, float, torch.Tensor.cpu, torch.Tensor.tolist, range, "{}".format,
    torch.Tensor.nonzero, lambda one: one.view(1)[one.view(1) > 0], lambda one: [1, 2][one],
    lambda one: one.view(1).expand(2)[one], lambda one: torch.equal(one, one)])
def test_the_counter_of_reads_counts(reading):
    with torch.inference_mode():
        seen = seen_of(lambda: reading(torch.tensor(1, device=DEVICE)))[1]
    assert len(WAITS & set(seen)) == 1


@our_rules
@both_drafters
@pytest.mark.parametrize("setting", [{}, {"temperature": 0},
                                     {"temperature": 0.7, "top_k": 2, "top_p": 0.9}], ids=str)
def test_a_round_reads_from_the_device_once(setting, make, verify, monkeypatch):
    def read(*tensors, right=specdec.read):
        result, seen = seen_of(lambda: right(*tensors))
        read_together.append(seen.count("cpu"))
        return result

    def waits(work):
        read_together.clear()
        result, seen = seen_of(work)
        inside = ["cpu", "tolist", "tolist"] if work is plainly else ["cpu"] + ["tolist"] * 5
        assert [name for name in seen if name in WAITS] == inside * len(result)
        assert read_together == [1] * len(result)

    def plainly():
        return list(plain(target, [1, 2, 1], 12, warp=shape, choose=choose, eos=8))

    read_together, choose, shape = [], seeded(), functools.partial(warp, **setting)
    target, draft = random_gpt(9, 2), random_gpt(9, 1, 1)
    monkeypatch.setattr(specdec, "read", read)
    waits(plainly)
    waits(lambda: decode(target, make(draft, shape), [1, 2, 1], 12, 4, verify, shape, 8))


def test_a_draft_step_has_at_most_21_operations():
    """One layer, its softmax and its draw: where a device takes about as long for a small operation
    as for none, their number is the time."""
    def operations(gamma):
        propose, choose = DraftModel(random_gpt(9, dtype=torch.float32), warp), seeded()
        return len(seen_of(lambda: propose([1, 2, 3], gamma, choose))[1])

    assert operations(4) - operations(3) == operations(3) - operations(2) <= 21


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
    target, draft, tokens = random_gpt(9, 2), random_gpt(9, 1, 1), [1, 2, 1, 2]
    for model in (target, draft):
        model.train(training)
    weights = copy.deepcopy([target.state_dict(), draft.state_dict()])
    before = global_states()
    rounds = decode(target, make(draft, warp), tokens, 9, 3, verify)
    for choose in (seeded(), forbidden):
        way = dict(warp=warp, choose=choose)
        for decoding in (plain(target, tokens, 9, **way),
                         speculative(target, make(draft, warp), tokens, 9, gamma=3, verify=verify,
                                     **way)):
            with pytest.raises(AssertionError) if choose is forbidden else decoding:
                next(decoding)
    assert tokens == [1, 2, 1, 2] and len(text(rounds)) == 9 and not torch.is_inference_mode_enabled()
    assert all(map(torch.equal, before, global_states()))
    for model, kept in zip((target, draft), weights):
        assert all(one.training == training for one in model.modules())
        assert all(torch.equal(weight, kept[name]) for name, weight in model.state_dict().items())
        assert all(weight.grad is None for weight in model.parameters())


@our_rules
def test_a_rule_writes_to_none_of_its_inputs(verify):
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.rand(n, 4, generator=generator, device=DEVICE).softmax(-1) for n in (4, 3)]
    inputs.append(torch.tensor([0, 1, 2], device=DEVICE))
    copies = copy.deepcopy(inputs)
    verify(*inputs, seeded())
    assert all(map(torch.equal, inputs, copies))
