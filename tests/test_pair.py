"""pair.py: what is kept is what was trained, and nothing else is taken for it."""

import io
from dataclasses import replace

import pytest
import torch

from micro import DEVICE, ended, is_one_clear_line, micro_pair
from model import GPT, Config
from pair import load_pair, pick_device, save_pair
from programs import decode
from rigs import forbidden


# ---------------------------------------------------------------- the file

@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_a_pair_saved_and_loaded_is_the_same_pair(dtype, tmp_path, monkeypatch):
    pair = replace(micro_pair(), minutes=2.5, prompts=["é", "b"])
    monkeypatch.chdir(tmp_path)
    assert save_pair(pair, "made/on the way").resolve() == tmp_path / "made/on the way/pair.pt"
    loaded = load_pair("made/on the way", DEVICE, dtype)
    for name in ("minutes", "prompts", "bits_per_byte"):
        assert getattr(loaded, name) == getattr(pair, name), name
    assert loaded.encoding.name == pair.encoding.name  # a fingerprint
    for mine, theirs in ((loaded.target, pair.target), (loaded.draft, pair.draft)):
        assert mine.config == theirs.config and mine.device.type == DEVICE.type
        weights = theirs.state_dict()
        assert all(torch.equal(weight.cpu(), weights[name].to(dtype))
                   for name, weight in mine.state_dict().items())


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Trap:
    """What a harmful file may hold: to load it would run this."""

    def __reduce__(self):
        return exec, ("raise KeyboardInterrupt",)


CUT = {"nothing": lambda whole: b"", "half": lambda whole: whole[:len(whole) // 2],
       "all but a byte": lambda whole: whole[:-1], "a list": lambda whole: saved([1, 2]),
       "a trap": lambda whole: saved(Trap())}
CHANGED = {
    "a weight too few": lambda whole: whole["draft"]["weights"].pop("embed.weight"),
    "another shape": lambda whole: whole["target"]["config"].update(n_embd=64),
    "an unknown setting": lambda whole: whole["target"]["config"].update(dropout=0.2),
    "a token twice": lambda whole: whole["encoding"].__setitem__(-1, whole["encoding"][0]),
    "another vocabulary": lambda whole: whole["draft"].update(vocabulary="another"),
    "no prompts": lambda whole: whole.pop("prompts"),
}


@pytest.mark.parametrize("how", (*CUT, *CHANGED))
def test_a_file_that_is_not_a_whole_pair_is_one_clear_line(how, tmp_path, monkeypatch, capsys):
    """Before anything is generated."""
    path = save_pair(micro_pair(), tmp_path)
    whole = torch.load(path, weights_only=True)
    if how in CHANGED:
        CHANGED[how](whole)
    path.write_bytes(CUT[how](path.read_bytes()) if how in CUT else saved(whole))
    monkeypatch.setattr(GPT, "forward", forbidden)
    result = ended(decode, ["def", "--checkpoint", tmp_path, "--device", "cpu"], capsys)
    assert is_one_clear_line(result, "pair.pt")


@pytest.mark.parametrize("rows", [(300, 284), (316, 316)])
def test_models_that_have_not_the_rows_of_the_vocabulary_are_refused(rows, tmp_path):
    """Of 300 tokens; two models of other rows may agree with each other."""
    models = [GPT(Config(n, context=64, n_head=2, n_embd=8)) for n in rows]
    save_pair(replace(micro_pair(), target=models[0], draft=models[1]), tmp_path)
    with pytest.raises(ValueError, match="vocabulary is another one than the tokenizer's"):
        load_pair(tmp_path)


# ---------------------------------------------------------------- saving

@pytest.mark.parametrize("error", (OSError("disk full"), RuntimeError("disk full"),
                                   KeyboardInterrupt()), ids=repr)
@pytest.mark.parametrize("at", ("torch.save", "os.replace"))
def test_a_save_that_fails_leaves_the_earlier_pair_whole(at, error, tmp_path, monkeypatch):
    """Torch raises a RuntimeError where the disk is full: it comes as an OSError."""
    before = save_pair(micro_pair(), tmp_path).read_bytes()

    def half_way(whole, path):
        if at == "torch.save":
            path.write_bytes(b"half a checkpoint")
        raise error

    monkeypatch.setattr(at, half_way)
    with pytest.raises((OSError, KeyboardInterrupt)):
        save_pair(micro_pair(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pair.pt"]
    assert (tmp_path / "pair.pt").read_bytes() == before


def test_each_process_writes_a_file_of_its_own(tmp_path, monkeypatch):
    """So that two which save into one directory at a time both leave a whole pair."""
    written = []
    monkeypatch.setattr(torch, "save", lambda whole, path: written.append(path) or path.touch())
    for process in (1, 2):
        monkeypatch.setattr("os.getpid", lambda: process)
        save_pair(micro_pair(), tmp_path)
    assert written[0] != written[1] and [path.name for path in tmp_path.iterdir()] == ["pair.pt"]


# ---------------------------------------------------------------- device and number format

def test_nothing_asks_about_cuda_where_the_device_is_the_cpu(tmp_path, monkeypatch, capsys):
    save_pair(micro_pair(), tmp_path)
    for name in ("is_available", "device_count", "current_device", "get_device_name", "synchronize",
                 "is_bf16_supported", "get_device_capability", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    arguments = ["def", "--max-new", 3, "--checkpoint", tmp_path, "--device", "cpu"]
    assert ended(decode, arguments, capsys)[0] == 0
    with pytest.raises(AssertionError):  # it would be seen
        pick_device("cuda")


@pytest.mark.parametrize("features, dtype", [
    ({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16),
    ({"avx512_bf16": False, "avx512_f": True}, torch.float32)], ids=str)
def test_the_number_format_is_what_the_processor_says(features, dtype, tmp_path, monkeypatch):
    """The products of a model of less than 384 columns are too small to gain by it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    config = replace(micro_pair().target.config, context=8, n_layer=1)
    wide, narrow = (GPT(replace(config, n_embd=width)) for width in (384, 352))
    save_pair(replace(micro_pair(), target=wide, draft=narrow), tmp_path)
    loaded = load_pair(tmp_path)
    assert [model.embed.weight.dtype for model in (loaded.target, loaded.draft)] == [
        dtype, torch.float32]
