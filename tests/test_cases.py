"""Cases that implementations of speculative decoding get wrong: a small input and the right answer, one after
another. Models are real with random weights, or `Scripted` where a path has to be forced."""

import ast
import contextlib
import math
import pickletools
import socket
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import specdec
import train_tiny
from exact import distance, law
from model import GPT, Config, KVCache
from rigs import (DEVICE, MICRO, SOURCE, Scripted, forbidden, identity_rig, micro_pair, quiet_pair, random_gpt, rules,
                  saying, seeded)
from sampling import VERIFY, residual, verify_token, warp
from specdec import Round, draft_model, plain, prompt_lookup, speculative, stream, tally
from train_tiny import END_OF_TEXT, Pair, bits_per_byte, draw_windows, encode, load_pair, save_pair, train_tokenizer

HERE = Path(__file__).resolve().parent
EXACT = 1e-12
greedy = partial(warp, temperature=0)


def text(rounds):
    return [token for one in rounds for token in one.new]


def first_token_law(target, draft, warp=warp, verify=verify_token):
    """The exact law of the first token of a text that starts with a draft."""
    return law(lambda choose: text(speculative(target, draft(warp), [0], 2, 1, warp, choose, verify))[0])


# ---------------------------------------------------------------- length

@pytest.mark.parametrize("gamma", (1, 4, 8))
@pytest.mark.parametrize("max_new", (0, 1, 2, 3, 6))
@pytest.mark.parametrize("drafter", ("model", "lookup"))
def test_exactly_as_many_tokens_come_out_as_were_asked_for(drafter, max_new, gamma):
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    propose = draft_model(draft, greedy) if drafter == "model" else prompt_lookup(9, DEVICE)
    prompt = [3, 1, 4, 1, 5]
    expected = list(plain(target, prompt, max_new, greedy, seeded()))
    rounds = list(speculative(target, propose, prompt, max_new, gamma, greedy, seeded()))
    assert len(expected) == max_new and text(rounds) == expected
    assert all(len(one.drafted) <= gamma for one in rounds)
    if drafter == "model":
        assert all(one.accepted == len(one.drafted) for one in rounds)


def test_asking_for_no_token_draws_nothing():
    target, draft = identity_rig()
    assert list(plain(target, [0], 0, warp, forbidden)) == []
    assert list(speculative(target, draft_model(draft, warp), [0], 0, 4, warp, forbidden)) == []


# ---------------------------------------------------------------- end of text in a block

EOS = 0
ENDS = {  # what target and draft say, gamma, the new tokens, who wrote them
    "first draft": ((EOS, 9, 9, 9, 9), (EOS, 9, 9, 9, 9), 4, [EOS], ["draft"]),
    "second draft": ((7, EOS, 9, 9, 9), (7, EOS, 9, 9, 9), 4, [7, EOS], ["draft"] * 2),
    "last draft": ((7, 7, 7, EOS, 9), (7, 7, 7, EOS, 9), 4, [7, 7, 7, EOS], ["draft"] * 4),
    "draft before a rejection": ((7, EOS, 9, 9, 9), (7, EOS, 8, 8, 8), 4, [7, EOS], ["draft"] * 2),
    "correction": ((7, EOS, 9, 9, 9), (7, 9, 9, 9, 9), 4, [7, EOS], ["draft", "correction"]),
    "bonus": ((7, EOS, 9, 9, 9), (7, 9, 9, 9, 9), 1, [7, EOS], ["draft", "bonus"]),
}


@rules
@pytest.mark.parametrize("target, draft, gamma, new, writers", ENDS.values(), ids=ENDS.keys())
def test_nothing_follows_an_end_of_text_in_the_text_or_in_any_count(target, draft, gamma, new, writers, verify):
    target = saying(*target)
    rounds = list(speculative(target, draft_model(saying(*draft), warp), [1], 9, gamma, warp, seeded(), verify, EOS))
    assert text(rounds) == new == list(plain(target, [1], 9, warp, seeded(), EOS))
    assert [writer for one in rounds for writer in one.writers] == writers
    counts, accepted = tally(rounds), writers.count("draft")
    assert counts["new_tokens"] == len(new) and counts["passes"] == 1
    assert counts["accepted"] == accepted and counts["tested"] == accepted + writers.count("correction")


def test_token_id_zero_is_no_end_of_text_unless_it_is_said_to_be():
    rounds = speculative(saying(0), draft_model(saying(0), warp), [1], 6, 4, warp, seeded())
    assert text(rounds) == [0] * 6


# ---------------------------------------------------------------- hole in the draft cache

def test_the_draft_cache_has_no_hole_after_a_full_acceptance():
    """The draft has not seen its own last token when all of its tokens are accepted."""
    target, draft = identity_rig(vocab_size=9, n_layer=2, context=64)
    passes = []
    target.register_forward_hook(lambda *_: passes.append(1))
    rounds = list(speculative(target, draft_model(draft, warp), [3, 1, 4, 1, 5], 40, 4, warp, seeded()))
    assert all(one.accepted == len(one.drafted) for one in rounds)
    assert len(passes) == len(rounds) == 8
    with torch.inference_mode():
        fresh = draft(torch.tensor([[3, 1, 4, 1, 5, *text(rounds)]], device=DEVICE))[0].log_softmax(-1)
    seen = 5
    for one in rounds:
        expected = fresh[seen - 1:seen - 1 + len(one.drafted)]
        assert (one.q.log() - expected).abs().max() < 1e-10
        seen += len(one.new)


# ---------------------------------------------------------------- temperature

@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("temperature", (0, 1e-40, 5e-324, 1e-300))
def test_a_temperature_of_almost_zero_is_the_argmax_and_not_nan(temperature, dtype):
    assert warp(torch.tensor([1, 2, 3], dtype=dtype, device=DEVICE), temperature).tolist() == [0, 0, 1]


@pytest.mark.parametrize("setting", [
    *(dict(temperature=t) for t in (-1, -1e-300, math.nan, math.inf, -math.inf)),
    *(dict(top_k=k) for k in (0, -1)), *(dict(top_p=p) for p in (0, -0.1, 1.0001, math.nan, math.inf))], ids=str)
def test_a_setting_out_of_range_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting)).replace("_", "-")):
        warp(torch.tensor([1.0, 2.0, 3.0]), **setting)


# ---------------------------------------------------------------- causal mask with a cache

def test_the_mask_with_a_cache_is_aligned_at_its_end():
    """Two queries over five keys, all zero: each takes the mean of the values 0 ... 4 that it may see."""
    model, seen = random_gpt(), []
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))  # (1, nh, T, keys)
    cache = KVCache(model)
    for ids in ([0, 1, 2], [0, 1]):
        model(torch.tensor([ids], device=DEVICE), cache)
    mask = seen[-1][:, :1] * 0  # keeps what is -inf as NaN, and drops what depends on the distance
    values = torch.arange(5.0, dtype=mask.dtype, device=DEVICE).view(1, 1, 5, 1)
    zeros = torch.zeros(1, 1, 5, 1, dtype=mask.dtype, device=DEVICE)
    y = F.scaled_dot_product_attention(zeros[:, :, :2], zeros, values, attn_mask=mask.isfinite())
    assert y.flatten().tolist() == pytest.approx([1.5, 2.0], abs=1e-12)


@pytest.mark.parametrize("chunks", ((7, 1), (1, 7), (5, 3), (3, 3, 2)), ids=str)
def test_a_text_fed_in_chunks_gives_the_logits_of_one_forward(chunks):
    model = random_gpt(vocab_size=9, n_layer=2)
    ids = torch.tensor([[3, 1, 4, 1, 5, 0, 2, 6]], device=DEVICE)
    cache = KVCache(model)
    with torch.inference_mode():
        parts = torch.cat([model(part, cache) for part in ids.split(chunks, 1)], 1)
        assert (parts - model(ids)).abs().max() < 1e-10


# ---------------------------------------------------------------- positions

def test_positions_go_on_from_what_the_cache_holds():
    model, seen = random_gpt(n_layer=2), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    cache, ids = KVCache(model), torch.tensor([[0, 1, 2, 0, 1, 2, 0]], device=DEVICE)

    def positions():
        """Row by row, the distance to the first token of the text, in units of that of its neighbour."""
        return [(bias[0, 0, :, 0] / model.bias[0, 1, 0]).round(decimals=9).tolist() for bias in seen[-2:]]

    model(ids[:, :5], cache)
    model(ids[:, 5:], cache)
    assert positions() == [[5, 6]] * 2
    cache.length = 3
    model(ids[:, 3:5], cache)
    assert positions() == [[3, 4]] * 2


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_every_distance_has_a_bias_of_its_own_in_every_dtype(dtype):
    model = GPT(Config(3, context=512, n_head=2, n_embd=8)).to(DEVICE, dtype)
    assert model.bias[0, -1].unique().numel() == 512


# ---------------------------------------------------------------- context edge

@pytest.mark.parametrize("drafter", ("model of 16", "model of 12", "lookup"))
def test_a_text_may_fill_the_context_to_the_last_token(drafter):
    """17 positions are named and 16 are fed: the last token of a text is never fed."""
    target, prompt = random_gpt(vocab_size=9, n_layer=2, context=16), [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]
    if drafter == "lookup":
        propose = prompt_lookup(9, DEVICE)
    else:
        propose = draft_model(random_gpt(vocab_size=9, n_layer=2, context=int(drafter[-2:])), greedy)
    expected = list(plain(target, prompt, 7, greedy, seeded()))
    assert text(speculative(target, propose, prompt, 7, 4, greedy, seeded())) == expected


def test_a_draft_whose_context_ends_before_the_prompt_drafts_nothing_and_harms_nothing():
    target, prompt = random_gpt(vocab_size=9, n_layer=2), [3, 1, 4, 1, 5]
    draft = random_gpt(vocab_size=9, context=4)
    rounds = list(speculative(target, draft_model(draft, greedy), prompt, 4, 4, greedy, seeded()))
    assert text(rounds) == list(plain(target, prompt, 4, greedy, seeded()))
    assert tally(rounds)["drafted"] == 0


def test_a_text_that_does_not_fit_is_refused_before_any_work():
    target = random_gpt(context=16)
    target.register_forward_pre_hook(forbidden)
    for prompt, max_new in (([0] * 10, 8), ([0] * 18, 0), ([], 1)):
        for decoding in (plain(target, prompt, max_new, warp, forbidden),
                         speculative(target, forbidden, prompt, max_new, 4, warp, forbidden)):
            with pytest.raises(ValueError, match="context" if prompt else "empty"):
                list(decoding)


# ---------------------------------------------------------------- filter on both sides

@rules
@pytest.mark.parametrize("setting, expected", [
    (dict(top_k=2), [0.625, 0.375, 0]), (dict(top_p=0.7), [0.625, 0.375, 0]), (dict(temperature=0), [1, 0, 0]),
    (dict(temperature=0.5), [25 / 38, 9 / 38, 4 / 38])], ids=str)
def test_the_text_follows_the_warped_target_when_both_sides_are_warped(setting, expected, verify):
    target, draft = Scripted([[0.5, 0.3, 0.2]]), Scripted([[0.4, 0.35, 0.25]])
    total = first_token_law(target, partial(draft_model, draft), partial(warp, **setting), verify)
    assert distance(total, dict(enumerate(expected))) < EXACT


# ---------------------------------------------------------------- greedy draft, soft q

@rules
def test_a_drafter_that_always_says_the_same_leaves_the_law_of_the_target(verify):
    def always_one(warp):
        def propose(tokens, gamma, choose):
            drafted = torch.ones(gamma, dtype=torch.long, device=DEVICE)
            return drafted, F.one_hot(drafted, 3).double()
        return propose

    total = first_token_law(Scripted([[0.6, 0.3, 0.1]]), always_one, warp, verify)
    assert distance(total, {0: 0.6, 1: 0.3, 2: 0.1}) < EXACT


@pytest.mark.parametrize("tokens", ([1, 2, 1], [1, 2, 1, 2, 1, 2]), ids=str)
def test_a_drafter_without_draws_gives_a_one_hot_q(tokens):
    drafted, q = prompt_lookup(3, DEVICE)(tokens, 3, forbidden)
    assert len(drafted) > 0 and torch.equal(q.argmax(-1), drafted) and torch.equal(q.sum(-1), q.amax(-1))
    drafted, q = draft_model(random_gpt(), greedy)(tokens, 3, seeded())
    assert torch.equal(q, F.one_hot(drafted, 3).to(q.dtype))


# ---------------------------------------------------------------- top-p edge

@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("top_p, kept", [(0.4, 1), (0.5, 1), (0.6, 2), (0.875, 3), (1e-8, 1), (1e-46, 1), (5e-324, 1),
                                         (1, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it_exactly(top_p, kept, dtype):
    p = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=dtype, device=DEVICE)
    probs = warp(p.log(), top_p=top_p)
    assert (probs > 0).tolist() == [i < kept for i in range(4)]
    assert torch.allclose(probs[:kept], p[:kept] / p[:kept].sum())


def test_a_top_p_of_one_changes_no_bit():
    z = torch.randn(100, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(warp(z, top_p=1), z.softmax(-1)) and torch.equal(warp(z, top_p=1.0), z.softmax(-1))
    assert torch.equal(warp(z, top_k=7, top_p=1), warp(z, top_k=7))


# ---------------------------------------------------------------- top-k edge

@pytest.mark.parametrize("top_k, kept", [(None, 4), (1, 1), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_top_k_keeps_exactly_k_where_logits_are_equal(top_k, kept):
    z = torch.tensor([2.0, 1.0, 1.0, 0.0], device=DEVICE)
    probs = warp(z, top_k=top_k)
    assert (probs > 0).tolist() == [i < kept for i in range(4)]
    assert torch.allclose(probs[:kept], z[:kept].softmax(-1))


@pytest.mark.parametrize("z", ([3, 3, 0], [0, 3, 3], [1, 1, 1], [0, 0, 3]), ids=str)
def test_top_k_of_one_is_the_token_that_greedy_picks(z):
    z = torch.tensor(z, dtype=torch.float32, device=DEVICE)
    assert torch.equal(warp(z, top_k=1), greedy(z)) and torch.equal(warp(z, top_p=1e-8), greedy(z))


# ---------------------------------------------------------------- residual

@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_the_residual_is_what_q_leaves_of_p_and_p_itself_where_that_is_nothing(dtype):
    p, q, certain = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.5, 0.2], [1, 0, 0]], dtype=dtype, device=DEVICE)
    assert residual(p, q).tolist() == [1, 0, 0]
    assert residual(certain, certain).tolist() == [1, 0, 0]
    assert torch.allclose(residual(p, p), p)
    assert torch.allclose(residual(p, p * 0), p)  # the bonus


@rules
def test_a_forced_rejection_where_p_equals_q_gives_a_token_of_p(verify):
    p = torch.tensor([[1.0, 0, 0], [0, 0, 1.0]], device=DEVICE)
    rejection = iter((torch.zeros(1, dtype=torch.long, device=DEVICE), None))

    def choose(probs):
        coins = next(rejection)
        return probs.argmax(-1) if coins is None else coins

    n, token = verify(p, p[:1], torch.tensor([0], device=DEVICE), choose)
    assert (n.item(), token.item()) == (0, 0)


# ---------------------------------------------------------------- counting

def test_coins_after_the_first_rejection_do_not_count():
    p, q = (torch.full((n, 3), 1 / 3, device=DEVICE) for n in (5, 4))
    tossed = torch.tensor([1, 0, 1, 1], device=DEVICE)
    n, token = verify_token(p, q, torch.tensor([0, 1, 2, 0], device=DEVICE),
                            lambda probs: tossed if len(probs) == 4 else probs.argmax(-1))
    assert n == 1
    one = Round([0, 1, 2, 0], n.item(), [0, token.item()], p, q, (0, 5, 1))
    assert tally([one]) == dict(new_tokens=2, passes=1, drafted=4, tested=2, accepted=1)
    assert one.writers == ["draft", "correction"]


# ---------------------------------------------------------------- row alignment

@rules
def test_each_row_of_the_target_judges_its_own_draft(verify):
    rounds = list(speculative(saying(6), draft_model(saying(5), warp), [1], 8, 1, warp, seeded(), verify))
    assert rounds[0].drafted == [5] and rounds[0].new == [6]
    script = (1, 2, 3, 4, 5, 6, 7, 8)  # each row says something else: a row read one place off shows
    rounds = list(speculative(saying(*script), draft_model(saying(*script), warp), [0], 8, 3, warp, seeded(), verify))
    assert text(rounds) == list(script) and len(rounds) == 2


@rules
def test_a_draft_that_is_always_wrong_costs_speed_and_nothing_else(verify):
    rounds = list(speculative(saying(6), draft_model(saying(5), warp), [1], 8, 4, warp, seeded(), verify))
    assert text(rounds) == [6] * 8 == list(plain(saying(6), [1], 8, warp, seeded()))
    assert len(rounds) == 8 and tally(rounds)["accepted"] == 0


# ---------------------------------------------------------------- dropout

@pytest.mark.parametrize("mode", (True, False), ids=("train", "eval"))
def test_a_model_decodes_the_same_in_either_mode_and_stays_in_it(mode):
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    assert not any(isinstance(module, torch.nn.modules.dropout._DropoutNd) for module in target.modules())
    expected = list(plain(target.eval(), [1], 9, greedy, seeded()))
    for model in (target, draft):
        model.train(mode)
    for _ in range(2):
        assert list(plain(target, [1], 9, greedy, seeded())) == expected
        assert text(speculative(target, draft_model(draft, greedy), [1], 9, 4, greedy, seeded())) == expected
    for decoding in (plain(target, [1], 9, greedy, forbidden),
                     speculative(target, draft_model(draft, greedy), [1], 9, 4, greedy, forbidden)):
        with pytest.raises(AssertionError):
            list(decoding)
    assert all(module.training == mode for model in (target, draft) for module in model.modules())


# ---------------------------------------------------------------- special text

@pytest.mark.parametrize("typed", (END_OF_TEXT, f"a{END_OF_TEXT}b", END_OF_TEXT * 2, "<|endoftext", "<|fim_prefix|>"))
def test_the_end_of_text_marker_typed_by_a_user_is_plain_text(typed, monkeypatch, capsys):
    pair, prompts = micro_pair(), []
    ids = pair.encoding.encode_ordinary(typed)
    assert pair.encoding.eot_token not in ids and pair.encoding.decode(ids) == typed
    assert encode([typed], pair.encoding).tolist() == [*ids, pair.encoding.eot_token]
    monkeypatch.setattr(specdec, "load_pair", lambda *_: pair)
    monkeypatch.setattr(specdec, "decode_speculative", lambda pair, tokens, *_, **__: prompts.append(tokens) or [])
    specdec.main([typed, "--max-new", "0", "--checkpoint", "x", "--device", DEVICE.type])
    assert prompts == [ids] and capsys.readouterr().out.startswith(typed)


# ---------------------------------------------------------------- partial UTF-8

def streamed(encoding, ids, capsys):
    rounds = [Round([], 0, [token], None, None, None) for token in ids]
    stream("", iter(rounds), encoding)
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.parametrize("written", ("é🙂", "aé\u0301日本", "\n\n", "👩‍👩‍👧"))
def test_a_character_cut_in_two_does_not_stop_the_stream(written, capsys):
    encoding = train_tokenizer(["aaab"], 300)  # a token a byte for all but the letters a
    ids = encoding.encode_ordinary(written)
    assert streamed(encoding, ids, capsys) == written
    for some in range(len(ids)):
        assert streamed(encoding, ids[:some], capsys) == encoding.decode(ids[:some])
    assert streamed(encoding, [*ids, encoding.eot_token], capsys) == written


# ---------------------------------------------------------------- vocabulary

def test_a_text_with_few_repetitions_gives_a_smaller_vocabulary_and_says_so(capsys):
    assert train_tokenizer(["aaab"], 300).n_vocab == 258  # 256 bytes, "aa", the end of text
    with pytest.raises(ValueError, match="no text"):
        train_tokenizer([""], 300)
    with pytest.raises(ValueError, match="too short"):  # too short for a window, not for a vocabulary
        train_tiny.train_pair(MICRO, ["aaab"], DEVICE)
    assert "stops at 258 of 300" in capsys.readouterr().out


def test_no_row_of_a_model_is_beyond_the_tokenizer():
    pair = micro_pair()
    for model in (pair.target, pair.draft):
        logits = model(torch.tensor([[0]]))
        assert model.config.vocab_size == logits.shape[-1] == pair.encoding.n_vocab
    for token in range(pair.encoding.n_vocab):
        pair.encoding.decode([token])


# ---------------------------------------------------------------- tiny data

@pytest.mark.parametrize("tokens, windows", ((7, 0), (8, 0), (9, 1), (10, 2)))
def test_data_is_long_enough_for_its_windows_or_refused(tokens, windows):
    data, generator = torch.arange(tokens), torch.Generator().manual_seed(0)
    if windows == 0:
        with pytest.raises(ValueError, match=f"{tokens} tokens, and 9"):
            draw_windows(data, 4, 8, generator)
        return
    drawn = draw_windows(data, 50, 8, generator)
    assert {tuple(w) for w in drawn.tolist()} == {tuple(range(i, i + 9)) for i in range(windows)}


@pytest.mark.parametrize("tokens, windows", ((1, 0), (7, 0), (8, 0), (9, 1), (10, 2), (500, 256 - 10)))
def test_held_out_text_is_measured_in_windows_from_end_to_end_or_refused(tokens, windows):
    """A model that is sure of nothing needs log2(V) bits a token, here of one byte each."""
    model, starts = GPT(Config(512, context=8, n_head=2, n_embd=8)).to(DEVICE), []
    model.register_forward_pre_hook(lambda _, arguments: starts.append(arguments[0][0, 0].item()))
    data, sizes = torch.arange(tokens), torch.ones(512)
    if windows == 0:
        with pytest.raises(ValueError, match=f"{tokens} tokens, and 9"):
            bits_per_byte(model, data, sizes, 8)
        return
    assert bits_per_byte(model, data, sizes, 8) == pytest.approx(9, rel=1e-5)
    assert len(starts) == windows and starts[0] == 0 and tokens - 9 - starts[-1] <= tokens // 256
    assert len({b - a for a, b in zip(starts, starts[1:])}) <= 1  # evenly spread


@pytest.mark.parametrize("train, held_out, said", [("ab" * 3, SOURCE, "^the text is too short"),
                                                   (SOURCE, "ab" * 3, "^the held-out tenth of the text is too short")])
def test_a_part_of_the_text_without_a_window_stops_the_training_before_it_starts(train, held_out, said, monkeypatch):
    monkeypatch.setattr(train_tiny, "fit", forbidden)
    monkeypatch.setattr(train_tiny, "split_documents", lambda _: ([train], [held_out]))
    with pytest.raises(ValueError, match=said):
        train_tiny.train_pair(MICRO, ["either"], DEVICE)


# ---------------------------------------------------------------- checkpoint

def leaves(value):
    """Every value in nested dicts and lists, keys too."""
    if type(value) is dict:
        return [leaf for item in value.items() for part in item for leaf in leaves(part)]
    if type(value) is list:
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_a_checkpoint_holds_tensors_and_plain_values_alone(tmp_path):
    path = save_pair(micro_pair(), tmp_path)
    assert {type(leaf) for leaf in leaves(torch.load(path, weights_only=True))} <= {str, int, float, torch.Tensor}
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    named = {argument for opcode, argument, _ in pickletools.genops(pickled) if opcode.name == "GLOBAL"}
    assert named == {"torch._utils _rebuild_tensor_v2", "torch FloatStorage", "collections OrderedDict"}
    assert str(tmp_path).encode() not in path.read_bytes() and str(HERE).encode() not in path.read_bytes()


FRESH = """
import sys, torch
whole = torch.load(sys.argv[1], weights_only=True)  # before any module of the project is known
sys.path.insert(0, sys.argv[2])
from model import GPT, Config
target = GPT(Config(**whole["target"]["config"]))
target.load_state_dict(whole["target"]["weights"])
print(repr(target(torch.tensor([[0, 1, 2]])).double().sum().item()))
"""


def test_a_checkpoint_loads_in_a_fresh_process(tmp_path):
    path = save_pair(micro_pair(), tmp_path)
    with torch.no_grad():
        here = load_pair(tmp_path, "cpu", torch.float32).target(torch.tensor([[0, 1, 2]])).double().sum().item()
    done = subprocess.run([sys.executable, "-c", FRESH, path, HERE.parent], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(here, rel=1e-5, abs=1e-4)


# ---------------------------------------------------------------- vocabularies differ

def other_pair(case):
    """The micro pair with something of another vocabulary in it."""
    pair = micro_pair()
    size, name = pair.encoding.n_vocab, pair.encoding.name
    small = dict(context=64, n_head=2, n_embd=8)
    target, draft = GPT(Config(size, tokenizer=name, **small)), GPT(Config(size, tokenizer=name, **small))
    encoding = pair.encoding
    if case == "fewer rows in the draft":
        draft = GPT(Config(size - 16, tokenizer=name, **small))
    elif case == "draft of another tokenizer":
        draft = GPT(Config(size, tokenizer="other", **small))
    elif case == "both of another tokenizer":
        encoding = train_tokenizer([SOURCE.swapcase()], size)
    elif case == "more rows than tokens":
        target, draft = (GPT(Config(size + 16, tokenizer=name, **small)) for _ in range(2))
    return Pair(target, draft, encoding, {}, ["a prompt"])


@pytest.mark.parametrize("case", ("fewer rows in the draft", "draft of another tokenizer", "both of another tokenizer",
                                  "more rows than tokens"))
def test_models_of_different_vocabularies_are_refused_before_anything_is_generated(case, tmp_path, monkeypatch, capsys):
    save_pair(other_pair("none"), tmp_path)
    load_pair(tmp_path)
    save_pair(other_pair(case), tmp_path)
    monkeypatch.setattr(GPT, "forward", forbidden)
    with pytest.raises(SystemExit) as end:
        specdec.main(["--checkpoint", str(tmp_path), "--device", DEVICE.type])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and "vocabularies differ" in err and err.count("\n") == 1


@pytest.mark.parametrize("size, tokenizer, said", [(48, "one", "64 tokens in the target, 48 in the draft"),
                                                   (64, "other", "target and draft have as many tokens, but not")])
def test_a_drafter_of_another_vocabulary_is_refused_before_any_work(size, tokenizer, said):
    target = GPT(Config(64, 16, n_embd=8, tokenizer="one")).to(DEVICE)
    draft = GPT(Config(size, 16, n_embd=8, tokenizer=tokenizer)).to(DEVICE)
    for model in (target, draft):
        model.register_forward_pre_hook(forbidden)
    with pytest.raises(ValueError, match=f"vocabularies differ.*{said}"):
        next(speculative(target, draft_model(draft, warp), [0], 5, 2, warp, forbidden))


# ---------------------------------------------------------------- near ties

@rules
def test_greedy_text_is_the_same_with_and_without_speculation(verify):
    """Random weights put logits close together. In float64 a difference of shape or order never decides."""
    for seed in range(30):
        target, draft = random_gpt(20, 2, seed, spread=0.3), random_gpt(20, 1, seed + 1000, spread=0.3)
        prompt = [seed % 20]
        expected = list(plain(target, prompt, 15, greedy, seeded()))
        for propose in (draft_model(draft, greedy), prompt_lookup(20, DEVICE)):
            assert text(speculative(target, propose, prompt, 15, 4, greedy, seeded(), verify)) == expected


# ---------------------------------------------------------------- Hypothesis on a busy machine

DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "multinomial", "bernoulli",
         "bernoulli_", "normal_", "uniform_", "exponential_", "random_", "shuffle", "choice", "choices"}


def calls(nodes):
    """(name called, the call) for every call by name among these nodes."""
    found = (node for node in nodes if isinstance(node, ast.Call))
    return [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in found]


def syntax(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_no_property_has_a_deadline():
    assert settings().deadline is None
    for path in HERE.glob("*.py"):
        for _, call in calls(syntax(path)):
            assert all(keyword.value.value is None for keyword in call.keywords if keyword.arg == "deadline"), path.name


def test_no_property_takes_a_fixture_that_lives_for_one_call():
    """Hypothesis calls a test many times for one set-up. Arguments may come from @given and from parametrize alone."""
    properties = 0
    for path in HERE.glob("test_*.py"):
        for function in (node for node in syntax(path) if isinstance(node, ast.FunctionDef)):
            decorators = dict(calls(function.decorator_list))
            if given := decorators.pop("given", None):
                properties += 1
                parametrized = len(function.decorator_list) - 1 - ("settings" in decorators)
                assert len(function.args.args) <= len(given.args) + len(given.keywords) + parametrized, function.name
    assert properties > 20


def test_every_draw_names_its_generator():
    for path in (*HERE.glob("*.py"), *HERE.parent.glob("*.py")):
        for name, call in calls(syntax(path)):
            named = [keyword.arg for keyword in call.keywords]
            assert name not in DRAWS or "generator" in named, (path.name, call.lineno)


# ---------------------------------------------------------------- no CUDA

def test_nothing_asks_about_cuda_where_the_device_is_the_cpu(tmp_path, monkeypatch, capsys):
    save_pair(micro_pair(), tmp_path)
    for name in ("is_available", "device_count", "current_device", "get_device_name", "synchronize", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    assert train_tiny.pick_device("cpu") == torch.device("cpu")
    specdec.main(["def", "--max-new", "3", "--checkpoint", str(tmp_path), "--device", "cpu"])
    with pytest.raises(AssertionError):  # it would be seen
        train_tiny.pick_device("cuda")


@pytest.mark.parametrize("program", (specdec, train_tiny), ids=("specdec", "train_tiny"))
@pytest.mark.parametrize("device", ("cuda", "tpu", ""))
def test_a_device_that_is_not_there_is_one_clear_line(program, device, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(GPT, "forward", forbidden)
    with pytest.raises(SystemExit) as end:
        program.main(["--device", device])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1
    assert "cpu" in err and (device.upper() in err.upper())


# ---------------------------------------------------------------- empty prompt

def test_an_empty_prompt_starts_from_the_end_of_text(monkeypatch, capsys):
    pair, prompts = micro_pair(), []
    monkeypatch.setattr(specdec, "load_pair", lambda *_: pair)
    monkeypatch.setattr(specdec, "decode_speculative", lambda pair, tokens, *_, **__: prompts.append(tokens) or [])
    specdec.main(["", "--max-new", "0", "--checkpoint", "x", "--device", DEVICE.type])
    assert prompts == [[pair.encoding.eot_token]]


# ---------------------------------------------------------------- offline

def test_training_and_decoding_need_no_network(tmp_path, monkeypatch, capsys):
    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, forbidden)
    save_pair(quiet_pair(MICRO, [SOURCE]), tmp_path)
    specdec.main(["def", "--max-new", "5", "--checkpoint", str(tmp_path), "--device", DEVICE.type])
    assert capsys.readouterr().out.startswith("def")


# ---------------------------------------------------------------- one read a round

class Waits(TorchDispatchMode):
    """Counts the operations that give the host a value of a tensor, so that it has to wait for the device."""
    NAMES = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put_") else ()  # t[mask] has the size that the mask decides
        if name in self.NAMES or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts the methods that copy a tensor to the host: they run below the level that Waits sees."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def reads_of(work):
    """(what work() gives, the names of all reads from device to host that it does)"""
    seen = []
    with Waits(seen), Copies(seen):
        result = work()
    return result, seen


@pytest.mark.parametrize("read", [
    torch.Tensor.item, bool, int, float, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, "{}".format, range,
    lambda one: one.view(1).numpy(force=True), lambda one: one.view(1)[one.view(1) > 0],
    lambda one: [1, 2, 3][one], lambda one: torch.equal(one, one), lambda one: 1 in one.view(1)],
    ids="item bool int float tolist cpu nonzero format range numpy mask index equal in".split())
@pytest.mark.parametrize("mode", (torch.inference_mode, contextlib.nullcontext), ids=("inference", "normal"))
def test_the_counter_of_reads_counts(read, mode):
    def work():
        with mode():
            return read(torch.tensor(1, device=DEVICE))
    assert len(reads_of(work)[1]) == 1
    assert reads_of(lambda: torch.tensor([1, 2, 3], device=DEVICE).cumsum(0).argmax(-1))[1] == []


@rules
@pytest.mark.parametrize("drafter", ("model", "lookup"))
@pytest.mark.parametrize("setting", (dict(), dict(temperature=0), dict(temperature=0.7, top_k=5, top_p=0.9)), ids=str)
def test_a_round_reads_from_the_device_once(setting, drafter, verify):
    target, draft, shape = random_gpt(9, 2), random_gpt(9, 1, 1), partial(warp, **setting)
    propose = draft_model(draft, shape) if drafter == "model" else prompt_lookup(9, DEVICE)
    choose = seeded()
    rounds, reads = reads_of(lambda: list(speculative(target, propose, [1, 2, 1], 12, 4, shape, choose, verify, 8)))
    assert reads == ["tolist"] * len(rounds)
    tokens, reads = reads_of(lambda: list(plain(target, [1, 2, 1], 12, shape, choose, 8)))
    assert reads == ["tolist"] * len(tokens)


# ---------------------------------------------------------------- NaN

@rules
@pytest.mark.parametrize("setting", (dict(), dict(temperature=0), dict(temperature=0.7, top_k=2, top_p=0.9)), ids=str)
@pytest.mark.parametrize("side", ("target", "draft"))
@pytest.mark.parametrize("after", (0, 3))
def test_nan_logits_are_an_error_and_never_a_token(after, side, setting, verify):
    """NaN in one logit, in the first round or in a later one."""
    good, bad = [[0.6, 0.3, 0.1]], [[0.6, 0.3, 0.1]] * after + [[0.6, math.nan, 0.1]]
    shape = partial(warp, **setting)
    target, draft = (Scripted(bad if side == name else good) for name in ("target", "draft"))
    written = []
    with pytest.raises(ValueError, match="NaN"):
        for one in speculative(target, draft_model(draft, shape), [0], 9, 2, shape, seeded(), verify):
            written += one.new
    assert len(written) <= after
    if side == "target":
        with pytest.raises(ValueError, match="NaN"):
            written = []
            for token in plain(target, [0], 9, shape, seeded()):
                written.append(token)
        assert len(written) == after


# ---------------------------------------------------------------- honest measurement

def test_a_clipped_last_round_counts_as_it_was():
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    rounds = list(speculative(target, draft_model(draft, warp), [1], 7, 4, warp, seeded()))
    assert tally(rounds) == dict(new_tokens=7, passes=2, drafted=5, tested=5, accepted=5)


def test_a_prediction_charges_a_clipped_round_as_it_was():
    """2 passes for 7 tokens, with 5 drafts: 2.5 a round and not 4."""
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    rounds = list(speculative(target, draft_model(draft, warp), [1], 7, 4, warp, seeded()))
    pair, costs = Pair(target, draft, None, {}, []), [(0.1, 1.2), (0.1, 1.2)]
    figures = specdec.prediction(pair, [[1]], [rounds], costs, 4, warp, "model", "token")
    assert figures["expected"] == pytest.approx(7 / 2) == figures["tokens_per_pass"]
    assert figures["predicted"] == pytest.approx(7 / 2 / (1.2 + 0.1 * 2.5))


def never(p, q, drafted, choose):
    """A rule that keeps no draft: one draw, and no coins."""
    return torch.zeros((), dtype=torch.long, device=p.device), choose(p[0])


def stops_at_a_coin(pair, warp):
    """A drafter that draws from rows without a leading axis, and tosses a coin of its own."""
    propose = draft_model(pair.draft, warp)
    half = torch.tensor([0.5, 0.5])
    return lambda tokens, gamma, choose: propose(tokens, min(gamma, choose(half).item()), choose)


def test_a_rule_and_a_drafter_of_ones_own_are_measured_and_told_and_not_foretold(monkeypatch):
    monkeypatch.setitem(VERIFY, "never", never)
    monkeypatch.setitem(specdec.DRAFTERS, "mine", stops_at_a_coin)
    for part in (dict(verify="never"), dict(drafter="mine")):
        (row,) = specdec.measure(micro_pair(), [[1, 2, 3]], 9, [2], warp, 0, repeats=1, **part)
        assert row["expected"] == row["tokens_per_pass"] and row["predicted"] > 0
    encoding = micro_pair().encoding
    rounds = list(specdec.decode_speculative(micro_pair(), [1, 2], 5, 2, warp, 0, verify="never"))
    told = list(specdec.trace_text("", rounds, encoding, "never"))
    assert len(told) == 5 and "rejected" in told[0] and "accepted" not in told[0].split("so far")[0].split("\n", 1)[1]


def test_the_clock_waits_for_the_device_on_both_sides(monkeypatch):
    seen = []
    monkeypatch.setattr(specdec, "synchronize", lambda device: seen.append("wait"))
    monkeypatch.setattr(specdec.time, "perf_counter", lambda: seen.append("time") or len(seen))
    assert specdec.clock(DEVICE, lambda: seen.append("work")) == (None, 3)
    assert seen == ["wait", "time", "work", "wait", "time"]


@rules
def test_the_counts_of_a_text_add_up(verify):
    target, draft = random_gpt(9, 2, context=64), random_gpt(9, 1, 1, context=64)
    rounds = list(speculative(target, draft_model(draft, warp), [1], 50, 4, warp, seeded(), verify))
    counts = tally(rounds)
    assert counts["new_tokens"] == 50 == counts["accepted"] + counts["passes"]  # each pass adds one of the target's own
    assert counts["accepted"] <= counts["tested"] <= counts["drafted"]
    assert counts["tested"] - counts["accepted"] == sum(one.writers[-1] == "correction" for one in rounds)
    for one in rounds:
        before, fed, kept = one.cache
        assert fed - kept == len(one.drafted) - one.accepted  # only what was rejected is rolled back
