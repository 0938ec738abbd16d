"""Training: what it reads, what each step does, and what is kept of it."""

import itertools
import math
import re
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

import specdec
import program
import train_tiny
from model import GPT, Config
from pair import CHECKPOINTS, load_pair, pair_path, save_pair
from rigs import (DEVICE, MICRO, SOURCE, ended, forbidden, is_one_clear_line, micro_pair,
                  quiet_pair, random_gpt)
from train_tiny import (PRESETS, Limit, bits_per_byte, cross_entropy, draw_windows,
                        excerpts, fit, notes_on, prepare, read_documents, soft_labels,
                        split_documents, total_variation)
from vocabulary import END_OF_TEXT, encode


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- corpus

@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
@example(["a" * 40, "bc", "de"])  # two documents behind the one that is cut
def test_the_held_out_text_is_the_last_tenth(documents):
    train, held_out = split_documents(documents)
    everything = "".join(documents)
    assert "".join(train + held_out) == everything
    assert len("".join(train)) == len(everything) * 9 // 10
    assert all(train) and all(held_out)


def test_the_default_corpus_is_this_pythons_own_source():
    paths = train_tiny.standard_library()
    assert paths == sorted(paths) and Path(textwrap.__file__) in paths
    assert len("".join(read_documents(paths))) > 1_000_000


BAD_FILES = {"missing": None, "not UTF-8": b"caf\xe9 au lait",
             "cut inside a character": "é".encode()[:1]}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_is_no_text_is_named_in_one_line(content, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_tiny, "train_pair", forbidden)
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    for bad in (path, tmp_path):
        arguments = ["--data", textwrap.__file__, bad, "--device", "cpu", "--out", tmp_path]
        assert is_one_clear_line(ended(train_tiny, arguments, capsys), bad.name)
    assert not pair_path(tmp_path).exists()


@pytest.mark.parametrize("written", ("", "a", "ab", "a short text", "\n"))
def test_a_text_too_short_to_train_on_is_refused(written, tmp_path, micro_preset, monkeypatch,
                                                 capsys):
    path = tmp_path / "short.txt"
    path.write_text(written, encoding="utf-8")
    monkeypatch.setattr(train_tiny, "fit", forbidden)
    arguments = ["--data", path, "--device", "cpu", "--out", tmp_path]
    code, _, err = ended(train_tiny, arguments, capsys)
    assert code == 2 and err.count("\n") == 1 and "too short" in err
    assert not pair_path(tmp_path).exists()


LETTERS = "abcdefghijklmnopqrst"  # no pair of them occurs twice: each one is a token


@pytest.mark.parametrize("shorter, said", [
    (0, "^the text is too short: 8 tokens, and 9 are"),
    (1, "^the held-out tenth of the text is too short")], ids=("training part", "held-out part"))
def test_a_part_without_a_window_stops_the_training_at_once(shorter, said, monkeypatch, capsys):
    """A window of 8 tokens needs 9 with the next one: 8 letters and the end of text."""
    parts = [[LETTERS[:8]], [LETTERS[:8]]]
    monkeypatch.setattr(train_tiny, "split_documents", lambda _: parts)
    preset = replace(MICRO, window=8)
    assert [len(data) for data in prepare(["either"], preset)[1:3]] == [9, 9]
    parts[shorter] = [LETTERS[:7]]
    monkeypatch.setattr(train_tiny, "fit", forbidden)
    with pytest.raises(ValueError, match=said):
        train_tiny.train_pair(preset, ["either"], DEVICE)


# ---------------------------------------------------------------- data

def sized(*sizes):
    """Stands in for an encoding whose tokens are so many bytes long; the last is the end of text."""
    return SimpleNamespace(eot_token=len(sizes) - 1,
                           decode_bytes=lambda ids: bytes(sum(sizes[i] for i in ids)))


@pytest.mark.parametrize("tokens, windows", ((9, 1), (10, 2)))
def test_every_window_that_the_data_holds_is_drawn(tokens, windows):
    drawn = draw_windows(torch.arange(tokens), 50, 8, generator())
    assert {tuple(w) for w in drawn.tolist()} == {tuple(range(i, i + 9)) for i in range(windows)}


@pytest.mark.parametrize("tokens, windows", ((9, 1), (10, 2), (500, 246)))
def test_held_out_text_is_measured_from_end_to_end(tokens, windows):
    """A model that is sure of nothing needs log2(V) bits a token, here of one byte each."""
    model, starts = GPT(Config(512, context=8, n_head=2, n_embd=8)).to(DEVICE), []
    model.register_forward_pre_hook(lambda _, fed: starts.extend(fed[0][:, 0].tolist()))
    assert bits_per_byte(model, torch.arange(tokens), sized(*[1] * 513), 8) == pytest.approx(
        9, rel=1e-5)
    assert len(starts) == windows and starts[0] == 0 and tokens - 9 - starts[-1] <= tokens // 256
    assert len({b - a for a, b in zip(starts, starts[1:])}) <= 1  # evenly spread


def test_bits_per_byte_count_the_bytes_of_the_tokens_foretold():
    """By hand: two windows, each token of another length, so that the first one's would show. An
    end of text (8) costs bits, and is no bytes of text."""
    model, data = random_gpt(vocab_size=9, context=4), torch.tensor([5, 1, 8, 3, 4, 2])
    sizes = sized(0, 1, 2, 3, 40, 5, 6, 7, 80)
    bits = 0
    for window in (data[0:5], data[1:6]):
        log_p = model(window[None, :-1].to(DEVICE))[0].log_softmax(-1).cpu()
        bits -= sum(log_p[i, window[i + 1]].item() for i in range(4)) / math.log(2)
    length = (1 + 0 + 3 + 40) + (0 + 3 + 40 + 2)
    assert bits_per_byte(model, data, sizes, 4) == pytest.approx(bits / length, rel=1e-5)


def test_the_mean_of_some_windows_is_over_windows_far_apart():
    model, data, sizes = random_gpt(vocab_size=9, context=4), torch.arange(20) % 9, sized(*[1] * 10)
    parts = [bits_per_byte(model, data[start:start + 5], sizes, 4) for start in (0, 6, 12)]
    some = bits_per_byte(model, data, sizes, 4, most=3)  # of 16
    assert some == pytest.approx(sum(parts) / 3, rel=1e-5)


# ---------------------------------------------------------------- the losses

def test_the_cross_entropy_is_of_the_token_after_each_one():
    model, windows = random_gpt(vocab_size=9), torch.tensor([[3, 1, 4], [1, 5, 2]], device=DEVICE)
    p = model(windows).softmax(-1)
    chances = [p[b, t, windows[b, t + 1]].item() for b in (0, 1) for t in (0, 1)]
    expected = -sum(map(math.log, chances)) / 4
    assert cross_entropy(model, windows).item() == pytest.approx(expected, rel=1e-5)


def test_the_distillation_loss_is_one_minus_the_overlap():
    draft = random_gpt(9)
    windows = torch.arange(12, device=DEVICE).view(2, 6) % 9
    p = torch.rand(2, 5, 9, generator=generator()).softmax(-1).to(DEVICE)
    q = draft(windows[:, :-1]).softmax(-1)
    overlaps = [min(pair) for pair in zip(p.flatten().tolist(), q.flatten().tolist())]
    loss = total_variation(draft, windows, p)
    assert loss.item() == pytest.approx(1 - sum(overlaps) / 10, abs=1e-5)
    assert total_variation(draft, windows, q.detach()).item() == pytest.approx(0, abs=1e-5)


# ---------------------------------------------------------------- the steps of training

SMALL = Config(9, context=16, n_head=2, n_embd=8)
RAMP = torch.arange(40) % 9


def small_windows(generator):
    return (draw_windows(RAMP, 2, 8, generator),)


@pytest.fixture
def float32(monkeypatch):
    """Matrix products in float32 whatever the processor is made for."""
    monkeypatch.setattr(train_tiny, "fast_dtype", lambda device: torch.float32)


def test_training_is_the_loop_written_out_by_hand(float32, capsys):
    """Ten steps: the same windows, optimisers and rates, and fresh gradients. The rate starts at a
    tenth of its peak, and falls from a third of the way on."""
    trained, by_hand = GPT(SMALL, seed=3).to(DEVICE), GPT(SMALL, seed=3).to(DEVICE)
    assert fit("x", trained, small_windows, cross_entropy, Limit(10, math.inf), seed=5) == 10

    matrices, draws = list(by_hand.blocks.parameters()), generator(5)
    embeddings = [by_hand.embed, by_hand.unembed]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
    adam = torch.optim.AdamW(embeddings, lr=0.01, betas=(0.9, 0.95), weight_decay=0)
    for part in (0.1, 1, 1, 1, *(left / 0.67 for left in (0.6, 0.5, 0.4, 0.3, 0.2, 0.1))):
        (windows,) = small_windows(draws)
        windows = windows.to(DEVICE)
        loss = F.cross_entropy(by_hand(windows[:, :-1]).reshape(-1, 9), windows[:, 1:].reshape(-1))
        weights = list(by_hand.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
            weight.grad = gradient
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.02 * part, 0.01 * part
        muon.step()
        adam.step()
    for mine, theirs in zip(trained.parameters(), by_hand.parameters()):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    start = GPT(SMALL, seed=3).to(DEVICE)
    assert not any(torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters()))


class Clock:
    """Stands still, but for what the work is made to take."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(program.time, "perf_counter", lambda: self.now)


def rates_of(limit, monkeypatch, seconds):
    """[(rate of Muon, rate of AdamW)] of a training in which each step takes so many seconds."""
    clock, rates = Clock(monkeypatch), []

    def step(optimizer):
        rates.append(optimizer.param_groups[0]["lr"])

    def loss_of(model, windows):
        clock.now += seconds
        return model.embed.square().sum()

    for optimizer in (torch.optim.Muon, torch.optim.AdamW):
        monkeypatch.setattr(optimizer, "step", step)
    taken = fit("x", GPT(SMALL).to(DEVICE), small_windows, loss_of, limit, seed=0)
    assert taken == len(rates) // 2
    return list(zip(rates[::2], rates[1::2]))


@pytest.mark.parametrize("limit, seconds", ((Limit(100, math.inf), 1), (Limit(10 ** 9, 2), 1.2)),
                         ids=("steps", "time"))
def test_the_rate_follows_whichever_limit_is_nearer(limit, seconds, monkeypatch, capsys):
    """A hundred steps, by their number or by two minutes of 1.2 seconds each."""
    rates = rates_of(limit, monkeypatch, seconds)
    assert len(rates) == 100
    parts = {0: 0.1, 1: 0.6, 2: 1, 33: 1, 34: 0.66 / 0.67, 50: 0.5 / 0.67, 99: 0.01 / 0.67}
    for i, part in parts.items():
        assert rates[i] == (pytest.approx(0.02 * part), pytest.approx(0.01 * part))


def test_training_ends_when_its_time_is_over(monkeypatch, capsys):
    assert len(rates_of(Limit(10 ** 9, 0.5), monkeypatch, seconds=7)) == 5  # 28 s, then 35 s
    assert len(rates_of(Limit(4, 0.5), monkeypatch, seconds=7)) == 4
    assert len(rates_of(Limit(4, 1e-9), monkeypatch, seconds=7)) == 1  # one step at least


def test_a_line_says_how_far_the_training_is(monkeypatch, capsys):
    """A line in ten seconds, and the last. The loss that it shows is the mean of the last 20."""
    clock, losses = Clock(monkeypatch), []
    for part in program.progress("target", Limit(30, 2), losses):
        assert part == pytest.approx(len(losses) / 30)
        clock.now += 3
        losses.append(4.0 if losses else 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and [lines[i] for i in (0, 4, 7)] == [
        "target      step 4/30, loss 3.500, 78 s left",
        "target      step 20/30, loss 3.900, 30 s left",
        "target      step 30/30, loss 4.000, 0 s left"]


def test_soft_labels_are_the_targets_own_distributions(float32, capsys):
    """Each with the windows that it was asked about; without a trace in the target."""
    target = random_gpt(9, 2, dtype=torch.float32)
    labels, draws = soft_labels(target, small_windows, Limit(5, math.inf), seed=7), generator(7)
    assert len(labels) == 5
    for windows, p in labels:
        assert torch.equal(windows, small_windows(draws)[0])
        expected = target(windows[:, :-1].to(DEVICE)).softmax(-1).cpu()  # (B, T, V)
        assert p.dtype == torch.float16 and not p.requires_grad
        assert torch.allclose(p.float(), expected, atol=1e-3)
    assert all(weight.grad is None for weight in target.parameters())
    entropies = [-(p.float() * p.float().log()).sum(-1).mean().item() for _, p in labels]
    (shown,) = re.findall("loss ([0-9.]+)", capsys.readouterr().out)  # in place of a loss
    assert float(shown) == pytest.approx(sum(entropies) / 5, abs=2e-3)


# ---------------------------------------------------------------- what each stage reads

TRAIN = "".join(itertools.islice(itertools.cycle("abc abd ab\n"), 900))
HELD_OUT = "XYZ\nXYXZ Z" * 10
STAGES = ("target", "draft", "distilling")


@pytest.fixture
def stages(monkeypatch):
    """What train_pair gives to `fit`, by stage. It trains all the same."""
    seen, real = {}, train_tiny.fit

    def spy(label, model, draw, loss_of, limit, seed):
        seen[label] = dict(model=model, draw=draw, loss_of=loss_of, limit=limit, seed=seed)
        return real(label, model, draw, loss_of, limit, seed)

    monkeypatch.setattr(train_tiny, "fit", spy)
    return seen


def test_each_part_of_the_text_is_read_in_its_place_alone(monkeypatch):
    """The two parts have no word in common: held-out text is measured on and gives the prompts, all
    else sees the training part."""
    fed, measured, forward, measure = set(), set(), GPT.forward, train_tiny.bits_per_byte

    def watched_forward(model, ids, *rest):
        fed.update(ids.flatten().tolist())
        return forward(model, ids, *rest)

    def watched_measure(model, data, sizes, window):
        measured.update(data.tolist())
        with monkeypatch.context() as unwatched:
            unwatched.setattr(GPT, "forward", forward)
            return measure(model, data, sizes, window)

    monkeypatch.setattr(GPT, "forward", watched_forward)
    monkeypatch.setattr(train_tiny, "bits_per_byte", watched_measure)
    pair = quiet_pair(MICRO, [TRAIN + HELD_OUT])
    encoding = pair.encoding
    spelled = [encoding.decode_single_token_bytes(i) for i in range(256, encoding.eot_token)]
    assert spelled and all(set(token) <= set(TRAIN.encode()) for token in spelled)
    assert pair.corpus.tolist() == encoding.encode_ordinary(TRAIN) + [encoding.eot_token]
    assert set(encoding.decode(sorted(fed)).removesuffix(END_OF_TEXT)) == set(TRAIN)
    assert set(encoding.decode(sorted(measured)).removesuffix(END_OF_TEXT)) == set(HELD_OUT)
    assert len(pair.prompts) > 1 and all(prompt in HELD_OUT for prompt in pair.prompts)


def test_every_window_is_a_piece_of_the_training_part(stages):
    """And each stage has batches of its own."""
    pair = quiet_pair(MICRO, [SOURCE])
    pieces = {tuple(window) for window in pair.corpus.unfold(0, MICRO.window + 1, 1).tolist()}
    batches = []
    for stage in STAGES:
        draws = generator(stages[stage]["seed"])
        drawn = [stages[stage]["draw"](draws)[0].tolist() for _ in range(40)]
        batches.append({tuple(map(tuple, batch)) for batch in drawn})
        assert all(len(batch) == MICRO.batch and pieces.issuperset(batch) for batch in batches[-1])
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(batches, 2))


def test_the_draft_is_trained_on_text_then_on_what_the_target_answers(stages, monkeypatch):
    answers, ask = [], train_tiny.soft_labels

    def asked(target, draw, limit, seed):
        assert set(stages) == {"target", "draft"} and limit is preset.limits["labels"]
        assert target is stages["target"]["model"]
        answers.extend(ask(target, draw, limit, seed))
        return answers

    monkeypatch.setattr(train_tiny, "soft_labels", asked)
    preset = replace(MICRO, limits=dict(target=Limit(2, math.inf), draft=Limit(3, math.inf),
                                        labels=Limit(4, math.inf), distilling=Limit(5, math.inf)))
    pair = quiet_pair(preset, [SOURCE])
    assert tuple(stages) == STAGES
    assert [stages[stage]["model"] for stage in STAGES] == [pair.target, pair.draft, pair.draft]
    assert all(stages[stage]["limit"] is preset.limits[stage] for stage in STAGES)
    losses = [stages[stage]["loss_of"] for stage in STAGES]
    assert losses == [cross_entropy, cross_entropy, total_variation]
    draws, draw = generator(), stages["distilling"]["draw"]
    drawn = {id(draw(draws)) for _ in range(100)}  # 4 · (3/4)^100: none of them is left out
    assert len(answers) == 4 and drawn == set(map(id, answers))


def test_the_seed_fixes_the_training_and_zero_is_one():
    first, other = micro_pair(), quiet_pair(MICRO, [SOURCE], seed=1)
    torch.manual_seed(123)  # the global generator has no part in it
    again = quiet_pair(MICRO, [SOURCE], seed=0)
    for name in ("target", "draft"):
        weights, same, different = (getattr(pair, name).state_dict()
                                    for pair in (first, again, other))
        assert all(torch.equal(weights[key], same[key]) for key in weights)
        assert not any(torch.equal(weights[key], different[key]) for key in weights)


def test_the_seed_reaches_the_first_weights(monkeypatch):
    monkeypatch.setattr(train_tiny, "fit", lambda *_: MICRO.limits["target"].steps)
    pair = quiet_pair(MICRO, [SOURCE], seed=5)
    for model in (pair.target, pair.draft):
        fresh = GPT(model.config, seed=5).state_dict()
        assert all(torch.equal(weight, fresh[name]) for name, weight in model.state_dict().items())


def test_training_learns_and_its_figures_are_those_of_held_out_text():
    """A model that is sure of nothing has log2(V) bits a token."""
    pair = micro_pair()
    held_out = encode(split_documents([SOURCE])[1], pair.encoding)
    for name in ("target", "draft"):
        measured = bits_per_byte(getattr(pair, name), held_out, pair.encoding, MICRO.window)
        assert pair.bits_per_byte[name] == pytest.approx(measured, rel=1e-4)
    untrained = bits_per_byte(GPT(pair.target.config), held_out, pair.encoding, MICRO.window)
    assert pair.bits_per_byte["target"] < 0.8 * untrained
    assert pair.bits_per_byte["draft"] < 0.9 * untrained


def test_a_pair_is_made_as_its_preset_says():
    pair = quiet_pair(replace(MICRO, window=8, gamma=5), [SOURCE])
    for model, shape in ((pair.target, MICRO.target), (pair.draft, MICRO.draft)):
        assert shape.items() <= vars(model.config).items()
        assert model.config.tokenizer == pair.encoding.name
    assert (pair.encoding.n_vocab, pair.gamma, pair.notes) == (MICRO.vocab_size, 5, [])


# ---------------------------------------------------------------- prompts and notes

def test_prompts_are_spread_over_the_text_and_start_at_lines():
    text = "".join(f"line {i:03} of the text\n" for i in range(100))  # 21 characters each
    prompts = excerpts(text)
    lines = [2100 * i // 8 // 21 for i in range(8)]  # where each eighth of the text begins
    assert [text.index(prompt) for prompt in prompts] == [21 * (line + 1) for line in lines]
    assert {len(prompt) for prompt in prompts} == {200}


@given(st.text(st.sampled_from("ab\n"), min_size=1, max_size=100), st.integers(1, 9),
       st.integers(1, 30))
def test_prompts_are_pieces_of_any_text(text, count, length):
    prompts = excerpts(text, count, length)
    assert 1 <= len(prompts) <= count
    assert all(prompt in text and 1 <= len(prompt) <= max(length, 1) for prompt in prompts)


def test_a_target_that_misses_a_tenth_of_its_steps_is_noted():
    assert notes_on(100, 100) == notes_on(90, 100) == []
    assert len(notes_on(89, 100)) == 1 and "after 89 of 100 steps" in notes_on(89, 100)[0]
    assert notes_on(89, math.inf) == []


def test_a_pair_that_was_cut_short_says_so_whenever_it_is_used(tmp_path, capsys):
    cut = replace(MICRO, limits=MICRO.limits | {"target": Limit(1_000_000, 1e-9)})
    pair = quiet_pair(cut, [SOURCE])
    assert len(pair.notes) == 1 and "after 1 of 1000000 steps" in pair.notes[0]
    save_pair(pair, tmp_path)
    assert load_pair(tmp_path).notes == pair.notes
    arguments = ["def", "--max-new", "0", "--checkpoint", tmp_path, "--device", "cpu"]
    assert f"note: {pair.notes[0]}\n" in ended(specdec, arguments, capsys)[1]


# ---------------------------------------------------------------- options

def test_a_preset_is_scaled_to_the_minutes_asked_for():
    limits = dict(target=Limit(400, 3.0), draft=Limit(300, 0.5), labels=Limit(281, 0.5),
                  distilling=Limit(1500, 1.0))
    preset = replace(PRESETS["tiny"], limits=limits)
    half, double = preset.scaled(2.5), preset.scaled(10)
    assert half.limits == dict(target=Limit(200, 1.5), draft=Limit(150, 0.25),
                               labels=Limit(141, 0.25), distilling=Limit(750, 0.5))
    assert (double.limits["target"], double.limits["draft"]) == (Limit(800, 6.0), Limit(600, 1.0))
    assert double.limits["labels"] == Limit(281, 1.0)  # more of them may not fit the memory
    assert replace(half, limits=limits) == preset


@pytest.mark.parametrize("name, minutes", (("tiny", 5), ("base", 30)))
def test_a_preset_ends_in_the_time_that_is_promised(name, minutes):
    """The corpus, the vocabulary and the saving take some seconds more than the four stages."""
    limits = PRESETS[name].limits
    assert len(limits) == 4 and 0 < sum(limit.minutes for limit in limits.values()) < minutes - 0.15


OPTIONS = {
    "nothing": ([], {}),
    "--data": (["--data", "one.txt", "two.txt"], dict(paths=["one.txt", "two.txt"])),
    "--preset": (["--preset", "base"], dict(
        preset=PRESETS["base"], directory=CHECKPOINTS / "base")),
    "--minutes": (["--minutes", "2"], dict(preset=PRESETS["tiny"].scaled(2))),
    "--out": (["--out", "here"], dict(directory="here")),
    "--seed": (["--seed", "7"], dict(seed=7)),
    "--preset and --minutes": (["--preset", "base", "--minutes", "2"], dict(
        preset=PRESETS["base"].scaled(2), directory=CHECKPOINTS / "base")),
}


@pytest.mark.parametrize("arguments, asked", OPTIONS.values(), ids=OPTIONS.keys())
def test_an_option_reaches_what_it_names_and_nothing_else(arguments, asked, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(train_tiny, "train_and_keep", lambda *given: seen.append(given))
    monkeypatch.setattr(train_tiny, "pick_device", lambda name: ("device", name))
    ended(train_tiny, [*arguments, "--device", "cpu"], capsys)
    usual = dict(preset=PRESETS["tiny"], paths=train_tiny.standard_library(),
                 device=("device", "cpu"), directory=CHECKPOINTS / "tiny", seed=0)
    assert seen == [tuple((usual | asked).values())]


def test_what_is_asked_for_reaches_the_training(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(train_tiny, "train_pair", lambda *given: seen.append(given) or micro_pair())
    (tmp_path / "a").write_text("first", encoding="utf-8")
    (tmp_path / "b").write_text("second", encoding="utf-8")
    paths = [tmp_path / "a", tmp_path / "b"]
    train_tiny.train_and_keep(MICRO, paths, torch.device("cpu"), tmp_path / "out", 7)
    assert seen == [(MICRO, ["first", "second"], torch.device("cpu"), 7)]
    assert load_pair(tmp_path / "out").prompts == micro_pair().prompts
    assert capsys.readouterr().out == f"kept in {pair_path(tmp_path / 'out')}\n"


@pytest.mark.parametrize("minutes", ("0", "-1", "nan", "inf", "-inf"))
def test_a_time_that_is_none_is_refused(minutes, monkeypatch, capsys):
    monkeypatch.setattr(train_tiny, "train_and_keep", forbidden)
    result = ended(train_tiny, [f"--minutes={minutes}", "--device", "cpu"], capsys)
    assert is_one_clear_line(result, "minutes", minutes)


def test_a_pair_is_trained_on_a_text_of_ones_own(tmp_path, micro_preset, capsys):
    mine, device = tmp_path / "mine", ["--device", DEVICE.type]
    arguments = ["--data", textwrap.__file__, "--out", mine, *device]
    code, out, err = ended(train_tiny, arguments, capsys)
    assert (code, err) == (0, "") and str(pair_path(mine)) in out
    assert "target      step 40/40, loss" in out and "left" in out
    assert "\x1b" not in out and "\r" not in out  # these are for terminals
    arguments = ["def", "--max-new", "4", "--checkpoint", mine, *device]
    assert ended(specdec, arguments, capsys)[0] == 0


# ---------------------------------------------------------------- interruptions and full disks

def training(out):
    return ["--data", textwrap.__file__, "--device", "cpu", "--out", out]


def interrupt(*_, **__):
    raise KeyboardInterrupt


def write_half(whole, path, *_, **__):
    Path(path).write_bytes(b"half a checkpoint")
    raise KeyboardInterrupt


INTERRUPTED = {"training": ("train_tiny.fit", interrupt), "writing": ("torch.save", write_half),
               "renaming": ("os.replace", interrupt)}


@pytest.mark.parametrize("earlier", (True, False), ids=("over an earlier pair", "with no pair"))
@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_interruption_leaves_the_earlier_pair_whole(when, earlier, tmp_path, micro_preset,
                                                       monkeypatch, capsys):
    name, broken = INTERRUPTED[when]
    out = tmp_path / "kept"
    before = save_pair(micro_pair(), out).read_bytes() if earlier else None
    if when != "training":  # it gets as far as saving
        monkeypatch.setattr(train_tiny, "train_pair", lambda *_: micro_pair())
    monkeypatch.setattr(name, broken)
    code, printed, err = ended(train_tiny, training(out), capsys)
    assert (code, err) == (130, "") and printed.endswith("\ninterrupted\n")
    monkeypatch.undo()
    if earlier:
        assert pair_path(out).read_bytes() == before
    assert [path.name for path in out.glob("*")] == ["pair.pt"] * earlier


def refuses_before_training(out, monkeypatch, capsys):
    monkeypatch.setattr(train_tiny, "train_pair", forbidden)
    result = ended(train_tiny, training(out), capsys)
    monkeypatch.undo()
    return is_one_clear_line(result, out.name)


def test_a_place_that_cannot_keep_a_pair_is_refused_before_training(tmp_path, micro_preset,
                                                                    monkeypatch, capsys):
    """A file where the directory should be."""
    taken = tmp_path / "taken"
    taken.write_text("a file", encoding="utf-8")
    assert refuses_before_training(taken, monkeypatch, capsys)
    assert taken.read_text(encoding="utf-8") == "a file"


@pytest.fixture
def sixteen_kilobytes():
    """No file may be larger, as after `ulimit -f 16`."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_a_pair_is_seen_before_training(tmp_path, micro_preset, sixteen_kilobytes,
                                                    monkeypatch, capsys):
    pair_path(tmp_path).write_bytes(b"an earlier pair")
    assert refuses_before_training(tmp_path, monkeypatch, capsys)
    assert [path.read_bytes() for path in tmp_path.glob("*")] == [b"an earlier pair"]


def test_the_room_looked_for_is_that_of_all_weights_and_tokens(tmp_path, monkeypatch):
    """Four bytes for each weight: two embeddings, and 12 C² in a layer, of the target and of the
    draft. Eight for each token: at most one for each byte of the texts."""
    sizes = []
    trial = SimpleNamespace(write=lambda data: sizes.append(len(data)))
    monkeypatch.setattr(train_tiny.tempfile, "TemporaryFile", lambda dir: nullcontext(trial))
    train_tiny.check_room_for(MICRO, ["abc", "é🙂"], pair_path(tmp_path))
    weights = 2 * 300 * 16 + 2 * 12 * 16 ** 2 + 2 * 300 * 8 + 12 * 8 ** 2
    assert sizes == [4 * weights + 8 * (3 + 2 + 4)]


def test_a_save_without_room_leaves_the_earlier_pair_whole(tmp_path, sixteen_kilobytes):
    """Where a disk is full, torch raises an error of a kind of its own."""
    pair_path(tmp_path).write_bytes(b"an earlier pair")
    with pytest.raises(OSError, match="cannot write"):
        save_pair(micro_pair(), tmp_path)
    assert [path.read_bytes() for path in tmp_path.glob("*")] == [b"an earlier pair"]


def test_a_trained_pair_that_cannot_be_kept_is_rescued(tmp_path, micro_preset, monkeypatch, capsys):
    """The disk fills up while the training goes on."""
    save, rescue = torch.save, tmp_path / "rescue"
    rescue.mkdir()

    def save_elsewhere(whole, path, *rest):
        if path.parent != rescue:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")
        save(whole, path, *rest)

    monkeypatch.setattr(train_tiny, "train_pair", lambda *_: micro_pair())
    monkeypatch.setattr(train_tiny.tempfile, "mkdtemp", lambda: str(rescue))
    monkeypatch.setattr(torch, "save", save_elsewhere)
    result = ended(train_tiny, training(tmp_path / "full"), capsys)
    assert is_one_clear_line(result, "cannot write", str(rescue))
    assert load_pair(rescue).prompts == micro_pair().prompts
    assert not pair_path(tmp_path / "full").exists()


def test_what_goes_wrong_while_training_is_not_taken_for_a_full_disk(tmp_path, micro_preset,
                                                                     monkeypatch, capsys):
    def output_is_gone(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(train_tiny, "train_pair", output_is_gone)
    monkeypatch.setattr(train_tiny, "save_pair", forbidden)
    assert is_one_clear_line(ended(train_tiny, training(tmp_path), capsys), "Input/output error")
