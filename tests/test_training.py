"""Training, from the corpus to the checkpoint: what is bad is refused, and what is good survives an interruption."""

import io
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specdec
import train_tiny
from model import GPT, Config
from rigs import DEVICE, MICRO, SOURCE, ended, is_one_clear_line, micro_pair, quiet_pair, random_gpt
from train_tiny import (bits_per_byte, bytes_per_token, cross_entropy, draw_windows, encode, load_pair, pair_path,
                        read_documents, save_pair, split_documents, total_variation)


# ---------------------------------------------------------------- corpus

@given(st.lists(st.text(), min_size=1))
def test_the_held_out_text_is_the_last_tenth_and_no_character_is_lost(documents):
    train, held_out = split_documents(documents)
    everything = "".join(documents)
    assert "".join(train + held_out) == everything
    assert len("".join(train)) == len(everything) * 9 // 10
    assert all(train) and all(held_out)


def test_the_default_corpus_is_this_pythons_own_source():
    paths = train_tiny.standard_library()
    assert paths == sorted(paths) and Path(textwrap.__file__) in paths
    assert len("".join(read_documents(paths))) > 1_000_000


BAD_FILES = {"missing": None, "empty": b"", "not UTF-8": b"caf\xe9 au lait", "cut inside a character": "é".encode()[:1]}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_cannot_be_read_as_text_is_named_in_one_clear_line(content, tmp_path, capsys):
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_bytes(content)
    for bad in (path, tmp_path):
        arguments = ["--data", textwrap.__file__, bad, "--device", "cpu", "--out", tmp_path]
        assert is_one_clear_line(ended(train_tiny, arguments, capsys), bad.name)
    assert not pair_path(tmp_path).exists()


@pytest.mark.parametrize("written", ("a", "ab", "a short text", "\n"))
def test_a_text_too_short_to_train_on_is_refused(written, tmp_path, micro_preset, monkeypatch, capsys):
    path = tmp_path / "short.txt"
    path.write_text(written, encoding="utf-8")
    monkeypatch.setattr(train_tiny, "fit", None)  # calling it would be a TypeError
    code, _, err = ended(train_tiny, ["--data", path, "--device", "cpu", "--out", tmp_path], capsys)
    assert code == 2 and err.count("\n") == 1 and ("too short" in err or "no text" in err)
    assert not pair_path(tmp_path).exists()


# ---------------------------------------------------------------- training

def test_a_seed_fixes_the_training_and_zero_is_a_seed_like_any_other():
    first, other = micro_pair(), quiet_pair(MICRO, [SOURCE], seed=1)
    torch.manual_seed(123)  # the global generator has no part in it
    again = quiet_pair(MICRO, [SOURCE], seed=0)
    for name in ("target", "draft"):
        weights, same, different = (getattr(pair, name).state_dict() for pair in (first, again, other))
        assert all(torch.equal(weights[key], same[key]) for key in weights)
        assert not any(torch.equal(weights[key], different[key]) for key in weights)


def test_training_learns():
    """A model that is sure of nothing has log2(V) bits a token."""
    pair = micro_pair()
    held_out = encode(split_documents([SOURCE])[1], pair.encoding)
    untrained = bits_per_byte(GPT(pair.target.config), held_out, bytes_per_token(pair.encoding), MICRO.window)
    assert pair.bits_per_byte["target"] < 0.8 * untrained and pair.bits_per_byte["draft"] < 0.9 * untrained


def test_every_prompt_is_held_out_text():
    held_out = "".join(split_documents([SOURCE])[1])
    assert len(micro_pair().prompts) > 1 and all(prompt in held_out for prompt in micro_pair().prompts)


def test_the_distillation_loss_is_one_minus_the_overlap_of_p_and_q():
    draft, windows = random_gpt(9, dtype=torch.float32), torch.arange(12, device=DEVICE).view(2, 6) % 9
    p = torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(0)).softmax(-1).to(DEVICE)
    q = draft(windows[:, :-1]).softmax(-1)
    overlaps = [min(pair) for pair in zip(p.flatten().tolist(), q.flatten().tolist())]
    assert total_variation(draft, windows, p).item() == pytest.approx(1 - sum(overlaps) / 10, abs=1e-5)
    assert total_variation(draft, windows, q.detach()).item() == pytest.approx(0, abs=1e-5)


def test_training_ends_when_its_time_is_over_however_many_steps_are_left(capsys):
    model, shapes = GPT(Config(9, context=16, n_head=2, n_embd=8)).to(DEVICE), set()

    def draw(generator):
        return (draw_windows(torch.arange(20) % 9, 2, 8, generator),)

    def loss_of(model, windows):
        shapes.add(tuple(windows.shape))
        return cross_entropy(model, windows)

    train_tiny.fit("x", model, draw, loss_of, steps=10 ** 9, seconds=0.2, seed=0)
    assert shapes == {(2, 9)} and "stopped by the time limit after" in capsys.readouterr().out


def test_a_pair_can_be_trained_on_windows_of_a_few_tokens():
    assert quiet_pair(replace(MICRO, window=8), [SOURCE]).bits_per_byte["draft"] > 0


# ---------------------------------------------------------------- interruptions

def interrupt(*_, **__):
    raise KeyboardInterrupt


def write_half(whole, path, *_, **__):
    Path(path).write_bytes(b"half a checkpoint")
    raise KeyboardInterrupt


INTERRUPTED = {"training": ("train_tiny.fit", interrupt), "writing": ("torch.save", write_half),
               "renaming": ("os.replace", interrupt)}


@pytest.mark.parametrize("earlier", (True, False), ids=("over an earlier pair", "with no pair there"))
@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_interruption_leaves_the_earlier_pair_whole_and_says_so(when, earlier, tmp_path, micro_preset,
                                                                   monkeypatch, capsys):
    name, broken = INTERRUPTED[when]
    out = tmp_path / "kept"
    before = save_pair(micro_pair(), out).read_bytes() if earlier else None
    if when != "training":
        monkeypatch.setattr(train_tiny, "train_pair", lambda *_: micro_pair())  # it gets as far as saving
    monkeypatch.setattr(name, broken)
    code, printed, err = ended(train_tiny, ["--data", textwrap.__file__, "--device", "cpu", "--out", out], capsys)
    assert (code, err) == (130, "") and "interrupted" in printed
    assert ("the earlier pair there is whole" if earlier else "there is no pair yet") in printed
    monkeypatch.undo()
    if earlier:
        assert pair_path(out).read_bytes() == before
        load_pair(out)
    assert [path.name for path in out.glob("*")] == ["pair.pt"] * earlier  # "nothing was written" is true


def test_a_save_that_fails_leaves_the_earlier_pair_whole(tmp_path, monkeypatch):
    before = save_pair(micro_pair(), tmp_path).read_bytes()

    def disk_full(whole, path, *_, **__):
        Path(path).write_bytes(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(OSError):
        save_pair(micro_pair(), tmp_path)
    monkeypatch.undo()
    assert pair_path(tmp_path).read_bytes() == before


def test_a_place_where_nothing_can_be_kept_is_refused_before_any_training(tmp_path, micro_preset, monkeypatch, capsys):
    taken = tmp_path / "taken"
    taken.write_text("a file where the directory should be", encoding="utf-8")
    monkeypatch.setattr(train_tiny, "fit", None)
    code, _, err = ended(train_tiny, ["--data", textwrap.__file__, "--device", "cpu", "--out", taken], capsys)
    assert code == 2 and err.count("\n") == 1 and "taken" in err


# ---------------------------------------------------------------- checkpoint

@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_a_pair_that_is_saved_and_loaded_is_the_same_pair(dtype, tmp_path):
    pair = micro_pair()
    save_pair(pair, tmp_path / "made" / "on the way")
    loaded = load_pair(tmp_path / "made" / "on the way", DEVICE, dtype)
    assert loaded.encoding.name == pair.encoding.name
    assert loaded.encoding.encode_ordinary(SOURCE) == pair.encoding.encode_ordinary(SOURCE)
    assert (loaded.bits_per_byte, loaded.prompts) == (pair.bits_per_byte, pair.prompts)
    for mine, theirs in ((loaded.target, pair.target), (loaded.draft, pair.draft)):
        assert mine.config == theirs.config and (mine.embed.dtype, mine.embed.device.type) == (dtype, DEVICE.type)
        weights = theirs.state_dict()
        assert all(torch.equal(weight.cpu(), weights[name].to(dtype)) for name, weight in mine.state_dict().items())


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


CUT = {"nothing": lambda whole: b"", "text": lambda whole: b"not a checkpoint\n", "ten bytes": lambda whole: whole[:10],
       "half": lambda whole: whole[:len(whole) // 2], "all but a byte": lambda whole: whole[:-1],
       "a class": lambda whole: saved(MICRO), "a list": lambda whole: saved([1, 2, 3]),  # a class would run code
       "other keys": lambda whole: saved({"model": {}, "tokens": []})}
CHANGED = {"a weight too few": lambda pair: pair["draft"]["weights"].pop("embed"),
           "a weight too many": lambda pair: pair["draft"]["weights"].update(extra=torch.zeros(1)),
           "a weight of another shape": lambda pair: pair["target"]["weights"].update(embed=torch.zeros(3, 3)),
           "an unknown setting": lambda pair: pair["target"]["config"].update(dropout=0.2),
           "a token too few": lambda pair: pair["tokens"].pop(),
           "a token twice": lambda pair: pair["tokens"].__setitem__(-1, pair["tokens"][0]),
           "no prompts": lambda pair: pair.pop("prompts")}


@pytest.mark.parametrize("how", (*CUT, *CHANGED))
def test_a_file_that_is_not_a_whole_pair_is_one_clear_line(how, tmp_path, capsys):
    path = save_pair(micro_pair(), tmp_path)
    if how in CUT:
        path.write_bytes(CUT[how](path.read_bytes()))
    else:
        pair = torch.load(path, weights_only=True)
        CHANGED[how](pair)
        torch.save(pair, path)
    with pytest.raises(ValueError):
        load_pair(tmp_path)
    assert is_one_clear_line(ended(specdec, ["def", "--checkpoint", tmp_path, "--device", "cpu"], capsys))


class Trap:
    """What a harmful checkpoint may hold: loading it calls a function, here one that makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_loading_a_checkpoint_runs_no_code_of_its_own(tmp_path):
    pair_path(tmp_path).write_bytes(saved({"target": Trap(tmp_path / "sprung")}))
    with pytest.raises(ValueError):
        load_pair(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_directory_without_a_pair_is_one_clear_line(tmp_path, capsys):
    result = ended(specdec, ["def", "--checkpoint", tmp_path / "none", "--device", "cpu"], capsys)
    assert is_one_clear_line(result, "none")
