"""Training: what it reads, what each step does, what is kept of it, and what is refused before."""

import itertools
import math
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_tiny
from micro import DEVICE, MICRO, SOURCE, Micro, ended, is_one_clear_line, micro_pair, quiet_pair
from model import GPT, Config
from pair import CHECKPOINTS, load_pair
from programs import options
from rigs import forbidden
from train_tiny import (SHARES, Recipe, bits_per_byte, cross_entropy, draw_windows, fit, new_model,
                        prepare, progress, soft_labels, split_documents, total_variation)
from vocabulary import END_OF_TEXT, encode


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def small_model(seed=0, n_layer=1):
    return new_model(Config(9, context=16, n_layer=n_layer, n_head=2, n_embd=8), seed).to(DEVICE)


def small_windows(generator):
    return (draw_windows(torch.arange(40) % 9, 2, 8, generator),)


@pytest.fixture
def float32(monkeypatch):
    """Matrix products in float32 whatever the processor is made for."""
    monkeypatch.setattr(train_tiny, "fast_dtype", lambda device: torch.float32)


# ---------------------------------------------------------------- corpus

def test_held_out_text_gives_the_prompts_and_nothing_else_is_made_of_it(capsys):
    """The last tenth. Its words are not in the vocabulary: each token of it is a byte."""
    train, held_out = "abc abd a\n" * 1080, "".join(f"LINE {i:03} OF XYZ\n" for i in range(75))
    encoding, data, rest, prompts = prepare([train + held_out], MICRO)
    assert encoding.decode(data.tolist()) == train + END_OF_TEXT and len(data) < len(train) / 2
    assert rest.tolist() == [*held_out.encode(), encoding.eot_token]
    lines = [150 * i // 16 + 1 for i in range(8)]  # the next one after each eighth
    assert prompts == [held_out[16 * line:][:200] for line in lines]
    assert split_documents(["a" * 40, "bc", "", "de"]) == (["a" * 39], ["a", "bc", "de"])


@pytest.mark.parametrize("tokens, windows", ((9, 1), (10, 2)))
def test_every_window_that_the_data_holds_is_drawn(tokens, windows):
    drawn = draw_windows(torch.arange(tokens), 50, 8, generator())
    assert {tuple(w) for w in drawn.tolist()} == {tuple(range(i, i + 9)) for i in range(windows)}


def test_a_part_without_a_window_is_refused(monkeypatch, capsys):
    """Each letter is a token, and one more is the end of text; 8 tokens to read, and the next."""
    parts, recipe = [["abcdefgh"], ["abcdefgh"]], replace(MICRO, window=8)
    monkeypatch.setattr(train_tiny, "split_documents", lambda _: parts)
    assert [len(data) for data in prepare(["either"], recipe)[1:3]] == [9, 9]
    for i, said in ((1, "held-out tenth of the text is too short: 8 tokens, and 9 are the least"),
                    (0, "the text is too short: 8 tokens")):
        parts[i] = ["abcdefg"]
        with pytest.raises(ValueError, match=said):
            prepare(["either"], recipe)


@pytest.mark.parametrize("most, starts", [(256, (0, 1)), (1, (0,))])
def test_bits_per_byte_count_the_bytes_of_the_tokens_foretold(most, starts, float32):
    """By hand, each token of another length, so that the first of a window would show. An end of
    text (8) costs bits, and is no bytes of text."""
    model, data, bits, length = small_model(), torch.tensor([5, 1, 8, 3, 4, 2]), 0, 0
    sizes = (0, 1, 2, 3, 40, 5, 6, 7, 80)
    encoding = SimpleNamespace(
        eot_token=8, decode_bytes=lambda ids: b"".join(bytes(sizes[i]) for i in ids))
    for window in (data[start:start + 5] for start in starts):
        log_p = model(window[None, :-1].to(DEVICE))[0].log_softmax(-1)
        bits -= sum(log_p[i, window[i + 1]].item() for i in range(4)) / math.log(2)
        length += sum(sizes[i] for i in window[1:] if i != 8)
    assert bits_per_byte(model, data, encoding, 4, most) == pytest.approx(bits / length, rel=1e-4)


def test_the_distillation_loss_is_one_minus_the_overlap_of_p_and_q(float32):
    model, windows = small_model(), torch.tensor([[3, 1, 4], [1, 5, 2]], device=DEVICE)
    p = torch.rand(2, 2, 9, generator=generator()).softmax(-1).to(DEVICE)
    q = model(windows[:, :-1]).softmax(-1)
    overlaps = [min(pair) for pair in zip(p.flatten().tolist(), q.flatten().tolist())]
    loss = total_variation(model, windows, p).item()
    assert loss == pytest.approx(1 - sum(overlaps) / 4, abs=1e-5)


# ---------------------------------------------------------------- the steps of training

def test_training_is_the_loop_written_out_by_hand(float32, capsys):
    """Ten steps: the same windows, optimisers and rates, and fresh gradients. The rate starts at a
    tenth of its peak, and falls from a third of the way on."""
    trained, by_hand, start = (small_model(seed=3) for _ in range(3))
    fit("target", trained, small_windows, cross_entropy, replace(MICRO, steps=10), seed=5)

    draws, weights = generator(5), dict(by_hand.named_parameters())
    inside = [name for name in weights if re.search("qkv|attn_out|mlp_in|mlp_out", name)]
    muon = torch.optim.Muon([weights[name] for name in inside], weight_decay=0.01)
    adam = torch.optim.AdamW([weights[name] for name in weights if name not in inside],
                             betas=(0.9, 0.95), weight_decay=0)
    for part in (0.1, 1, 1, 1, *(left / 0.67 for left in (0.6, 0.5, 0.4, 0.3, 0.2, 0.1))):
        windows = small_windows(draws)[0].to(DEVICE)
        loss = F.cross_entropy(by_hand(windows[:, :-1]).reshape(-1, 9), windows[:, 1:].reshape(-1))
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for weight, gradient in zip(weights.values(), gradients):
            weight.grad = gradient
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.02 * part, 0.01 * part
        muon.step()
        adam.step()
    for mine, theirs, was in zip(trained.parameters(), by_hand.parameters(), start.parameters()):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6) and not torch.equal(mine, was)


def test_a_stage_ends_with_its_steps_or_its_time_whichever_is_first(monkeypatch, capsys):
    """All stages together have the minutes of the recipe. A line in ten seconds, and the last, says
    how far it is; the loss shown is the mean of the last 20."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(train_tiny.time, "perf_counter", lambda: clock.now)

    def parts(label, recipe, seconds, most=math.inf):
        losses = []
        for part in progress(label, recipe, losses, most):
            yield part
            clock.now += seconds
            losses.append(4.0 if losses else 2.0)

    tenths = [pytest.approx(i / 10) for i in range(10)]
    for label, share in SHARES.items():
        recipe = Recipe(minutes=10 / share)  # 600 seconds for this stage
        assert list(parts(label, recipe, 60)) == tenths
        assert list(parts(label, replace(recipe, steps=10), 1)) == tenths
        assert list(parts(label, recipe, 1, most=10)) == tenths
        assert list(parts(label, replace(recipe, minutes=1e-9), 1)) == [0]  # a step at least
    assert sum(SHARES.values()) == pytest.approx(1) and Recipe().minutes < 4.85
    capsys.readouterr()
    list(parts("target", replace(MICRO, steps=30), 3))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and [lines[i] for i in (0, 4, -1)] == [
        "target       13%, step 4, loss 3.500", "target       67%, step 20, loss 3.900",
        "target      100%, step 30, loss 4.000"]


def test_soft_labels_are_the_targets_own_distributions(float32, monkeypatch, capsys):
    """Each with the windows that it was asked about, and no more than fit the memory."""
    monkeypatch.setattr(train_tiny, "MOST_LABELS", 5)
    target, draws = small_model(n_layer=2), generator(7)
    labels = soft_labels(target, small_windows, MICRO, seed=7)
    assert len(labels) == 5
    for windows, p in labels:
        assert torch.equal(windows, small_windows(draws)[0])
        expected = target(windows[:, :-1].to(DEVICE)).softmax(-1).cpu()  # (B, T, V)
        assert p.dtype == torch.float16 and torch.allclose(p.float(), expected, atol=1e-3)


# ---------------------------------------------------------------- what each stage reads

def stages_of(seed, monkeypatch):
    """(pair, {stage: (its model, its loss, 12 batches of windows as it draws them)}). No stage
    trains anything."""
    stages = {}

    def stage(label, model, draw, loss_of, recipe, seed):
        draws = generator(seed)
        batches = [draw(draws) for _ in range(12)]
        stages[label] = model, loss_of, [
            tuple(map(tuple, windows.tolist())) for (windows,) in batches]
        return batches

    monkeypatch.setattr(train_tiny, "fit", stage)
    monkeypatch.setattr(train_tiny, "soft_labels", lambda target, draw, *rest: stage(
        "soft labels", target, draw, None, *rest))
    return quiet_pair(MICRO, [SOURCE], seed), stages


def test_each_stage_reads_windows_of_its_own_and_the_draft_is_taught_by_the_target(monkeypatch):
    """The labels have windows of their own too: of what the target has just read, it is too sure.
    The seed decides which."""
    (pair, stages), (_, others) = (stages_of(seed, monkeypatch) for seed in (0, 1))
    assert list(stages) == ["target", "draft", "soft labels", "distilling"]
    assert [stage[:2] for stage in stages.values()] == [
        (pair.target, cross_entropy), (pair.draft, cross_entropy), (pair.target, None),
        (pair.draft, total_variation)]
    data = encode(split_documents([SOURCE])[0], pair.encoding)
    pieces = {tuple(window) for window in data.unfold(0, MICRO.window + 1, 1).tolist()}
    read, of_other_seed = ({name: {*batches} for name, (*_, batches) in one.items()}
                           for one in (stages, others))
    for name, batches in read.items():
        assert all(map(pieces.issuperset, batches)), f"{name}: not from the text to train on"
        assert batches.isdisjoint(of_other_seed[name]), f"{name}: the seed is lost"
    for one, other in itertools.combinations(("target", "draft", "soft labels"), 2):
        assert read[one].isdisjoint(read[other]), (one, other)
    orders = [[one["soft labels"][-1].index(batch) for batch in one["distilling"][-1]]
              for one in (stages, others)]
    assert orders[0] != orders[1] and len({*orders[0]}) > 4  # of 12: chosen at random


def test_the_seed_fixes_the_training_and_the_global_state_has_no_part_in_it():
    pairs = []
    for seed in (0, 0, 1):
        before = torch.manual_seed(123 + len(pairs)).get_state()
        pairs.append(quiet_pair(replace(MICRO, steps=3), [SOURCE], seed))
        assert torch.equal(before, torch.random.get_rng_state())
    for name in ("target", "draft"):
        weights, same, different = (getattr(pair, name).state_dict() for pair in pairs)
        assert all(torch.equal(weights[key], same[key]) for key in weights)
        assert not any(torch.equal(weights[key], different[key]) for key in weights)
    assert not torch.equal(small_model(seed=0).embed.weight, small_model(seed=1).embed.weight)


def test_training_learns_and_its_figures_are_those_of_held_out_text():
    pair = micro_pair()
    held_out = encode(split_documents([SOURCE])[1], pair.encoding)
    untrained = bits_per_byte(GPT(pair.target.config), held_out, pair.encoding, MICRO.window)
    for name in ("target", "draft"):
        measured = bits_per_byte(getattr(pair, name), held_out, pair.encoding, MICRO.window)
        assert pair.bits_per_byte[name] == pytest.approx(measured, rel=1e-3)
        assert measured < 0.7 * untrained


# ---------------------------------------------------------------- the command line

OPTIONS = {
    "": {}, "--seed 7": dict(seed=7), "--out here/x": dict(directory="here/x"),
    "--target 12x64 --draft 2x96": dict(recipe=Recipe(target="12x64", draft="2x96")),
    "--minutes 2.5": dict(recipe=Recipe(minutes=2.5)),
    "--data FILE FILE": dict(documents=[SOURCE, SOURCE])}


@pytest.mark.parametrize("asked", OPTIONS)
def test_an_option_reaches_what_it_names_and_nothing_else(asked, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(options, "train_pair", lambda *given: seen.append(given))
    monkeypatch.setattr(options, "standard_library", lambda: [textwrap.__file__])
    words = [textwrap.__file__ if word == "FILE" else word for word in asked.split()]
    assert ended(train_tiny, [*words, "--device", "cpu"], capsys) == (0, "", "")
    usual = dict(recipe=Recipe(), documents=[SOURCE], device=torch.device("cpu"),
                 directory=CHECKPOINTS / "tiny", seed=0)
    assert seen == [tuple((usual | OPTIONS[asked]).values())]
    assert Path(textwrap.__file__) in train_tiny.standard_library()


def training(out, *more):
    return ["--data", textwrap.__file__, "--device", "cpu", "--out", out, *more]


BAD = {"a shape is": [f"--target={shape}" for shape in (
           "0x128", "8x", "x8", "8x384x2", "-1x64", "8", "8 x 32", "8x0")] + ["--draft=1.5x32"],
       "multiple of 32": ["--target=4x130"],
       "minutes": ["--minutes=0", "--minutes=-1", "--minutes=nan", "--minutes=inf"],
       "no device": ["--device=tpu"], "Is a directory": ["--data="],
       "no.txt": ["--data=no.txt"], "is not UTF-8 text": [f"--data={sys.executable}"]}


@pytest.mark.parametrize("said, asked", [(said, one) for said, all in BAD.items() for one in all])
def test_a_value_that_is_none_is_one_clear_line(said, asked, tmp_path, monkeypatch, capsys):
    """Before the work."""
    monkeypatch.setattr(train_tiny, "prepare", forbidden)
    result = ended(train_tiny, training(tmp_path, asked), capsys)
    assert is_one_clear_line(result, said) and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what is kept, and what is not

def test_a_pair_is_made_as_asked_for_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(options, "Recipe", Micro)
    asked = ["--target", "3x64", "--draft", "2x96"]
    code, out, err = ended(train_tiny, training(tmp_path / "mine", *asked), capsys)
    pair = load_pair(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["pair.pt"], "a trial is left"
    assert (code, err, pair.minutes) == (0, "", MICRO.minutes)
    assert pair.target.config == Config(300, n_layer=3, n_head=2, n_embd=64)
    assert pair.draft.config == Config(300, n_layer=2, n_head=3, n_embd=96)
    assert "target {target:.3f}, draft {draft:.3f}\n".format(**pair.bits_per_byte) in out
    assert out.endswith(f"kept in {tmp_path / 'mine' / 'pair.pt'}\n") and "\x1b" not in out


@pytest.mark.parametrize("no_room", (True, False), ids=("no room", "a file in its place"))
def test_a_place_that_keeps_no_pair_is_seen_before_training(no_room, tmp_path, monkeypatch, capsys):
    earlier = tmp_path / "pair.pt"
    earlier.write_bytes(b"what was there")
    monkeypatch.setattr(options, "Recipe", Micro)
    monkeypatch.setattr(train_tiny, "fit", forbidden)
    if no_room:  # torch raises a RuntimeError then
        monkeypatch.setattr(torch, "save", lambda *_: exec("raise RuntimeError('disk full')"))
    code, _, err = ended(train_tiny, training(tmp_path if no_room else earlier), capsys)
    assert code == 2 and err.count("\n") == 1 and str(tmp_path) in err
    assert list(tmp_path.iterdir()) == [earlier] and earlier.read_bytes() == b"what was there"
