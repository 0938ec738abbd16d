"""pair.py: what is kept is what was trained, and nothing else is taken for it."""

import io
import pickletools
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pair as pair_module
import specdec
import train_tiny
from model import GPT, Config
from pair import Pair, fast_dtype, load_pair, pair_path, pick_device, pick_threads, save_pair
from rigs import DEVICE, MICRO, SOURCE, ended, forbidden, is_one_clear_line, micro_pair
from vocabulary import END_OF_TEXT, train_tokenizer

HERE = Path(__file__).resolve().parent


# ---------------------------------------------------------------- a pair

@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_a_pair_saved_and_loaded_is_the_same_pair(dtype, tmp_path):
    pair = micro_pair()
    save_pair(pair, tmp_path / "made" / "on the way")
    loaded = load_pair(tmp_path / "made" / "on the way", DEVICE, dtype)
    assert loaded.encoding.name == pair.encoding.name
    assert loaded.encoding.encode_ordinary(SOURCE) == pair.encoding.encode_ordinary(SOURCE)
    assert (loaded.bits_per_byte, loaded.prompts) == (pair.bits_per_byte, pair.prompts)
    for mine, theirs in ((loaded.target, pair.target), (loaded.draft, pair.draft)):
        assert mine.config == theirs.config
        assert (mine.embed.dtype, mine.embed.device.type) == (dtype, DEVICE.type)
        weights = theirs.state_dict()
        assert all(torch.equal(weight.cpu(), weights[name].to(dtype))
                   for name, weight in mine.state_dict().items())


def test_corpus_gamma_and_notes_survive_saving(tmp_path):
    pair = micro_pair()
    noted = replace(pair, gamma=7, notes=["trained for a minute only", "é"])
    save_pair(noted, tmp_path)
    loaded = load_pair(tmp_path)
    assert torch.equal(loaded.corpus, pair.corpus) and len(pair.corpus) > 1000
    assert (loaded.gamma, loaded.notes) == (7, noted.notes)


def test_a_directory_is_looked_for_where_the_user_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pair(micro_pair(), "mine")
    assert (tmp_path / "mine" / "pair.pt").exists() and load_pair("mine").gamma == MICRO.gamma


def test_the_corpus_is_the_text_that_was_trained_on():
    """All of it and nothing held out: a drafter built from the corpus may not know more."""
    pair = micro_pair()
    text = pair.encoding.decode(pair.corpus.tolist()).removesuffix(END_OF_TEXT)
    assert text == SOURCE[:len(SOURCE) * 9 // 10]
    assert all(prompt not in text for prompt in pair.prompts)


def test_a_pair_can_be_the_key_of_a_cache(tmp_path):
    pair = micro_pair()
    save_pair(pair, tmp_path)
    known = {pair: "trained", load_pair(tmp_path): "loaded"}
    assert len(known) == 2 and known[pair] == "trained"


def test_a_pair_says_in_which_formats_and_threads_it_runs(tmp_path):
    save_pair(micro_pair(), tmp_path)
    loaded = load_pair(tmp_path, "cpu", torch.float64)
    loaded.draft.bfloat16()
    assert loaded.machine() == "cpu, target in float64, draft in bfloat16, 1 threads"


# ---------------------------------------------------------------- the file

def leaves(value):
    """Every value in nested dicts and lists, keys too."""
    if type(value) is dict:
        return [leaf for item in value.items() for part in item for leaf in leaves(part)]
    if type(value) is list:
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_a_checkpoint_holds_tensors_and_plain_values_alone(tmp_path):
    path = save_pair(micro_pair(), tmp_path)
    kinds = {type(leaf) for leaf in leaves(torch.load(path, weights_only=True))}
    assert kinds <= {str, int, float, torch.Tensor}
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        steps = list(pickletools.genops(archive.read(name)))
    named = {argument for opcode, argument, _ in steps if opcode.name == "GLOBAL"}
    assert named == {"torch._utils _rebuild_tensor_v2", "torch FloatStorage", "torch LongStorage",
                     "collections OrderedDict"}
    whole = path.read_bytes()
    assert str(tmp_path).encode() not in whole and str(HERE).encode() not in whole


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
        target = load_pair(tmp_path, "cpu", torch.float32).target
        here = target(torch.tensor([[0, 1, 2]])).double().sum().item()
    done = subprocess.run([sys.executable, "-c", FRESH, path, HERE.parent], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(here, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("error", (OSError(28, "disk full"), RuntimeError("disk full")), ids=repr)
def test_a_save_that_fails_leaves_the_earlier_pair_whole(error, tmp_path, monkeypatch):
    """Torch raises a RuntimeError where the disk is full: it comes as an OSError."""
    before = save_pair(micro_pair(), tmp_path).read_bytes()

    def disk_full(whole, path, *_, **__):
        Path(path).write_bytes(b"half a checkpoint")
        raise error

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(OSError):
        save_pair(micro_pair(), tmp_path)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["pair.pt"]
    assert pair_path(tmp_path).read_bytes() == before


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


CUT = {
    "nothing": lambda whole: b"",
    "text": lambda whole: b"not a checkpoint\n",
    "ten bytes": lambda whole: whole[:10],
    "half": lambda whole: whole[:len(whole) // 2],
    "all but a byte": lambda whole: whole[:-1],
    "a class": lambda whole: saved(MICRO),  # a class would run code
    "a list": lambda whole: saved([1, 2, 3]),
    "other keys": lambda whole: saved({"model": {}, "tokens": []}),
}
CHANGED = {
    "a weight too few": lambda whole: whole["draft"]["weights"].pop("embed"),
    "a weight too many": lambda whole: whole["draft"]["weights"].update(extra=torch.zeros(1)),
    "another shape": lambda whole: whole["target"]["weights"].update(embed=torch.zeros(3, 3)),
    "an unknown setting": lambda whole: whole["target"]["config"].update(dropout=0.2),
    "a token too few": lambda whole: whole["tokens"].pop(),
    "a token twice": lambda whole: whole["tokens"].__setitem__(-1, whole["tokens"][0]),
    "no prompts": lambda whole: whole.pop("prompts"),
    "no corpus": lambda whole: whole.pop("corpus"),
    "no gamma": lambda whole: whole.pop("gamma"),
}


@pytest.mark.parametrize("how", (*CUT, *CHANGED))
def test_a_file_that_is_not_a_whole_pair_is_refused(how, tmp_path, capsys):
    path = save_pair(micro_pair(), tmp_path)
    if how in CUT:
        path.write_bytes(CUT[how](path.read_bytes()))
    else:
        whole = torch.load(path, weights_only=True)
        CHANGED[how](whole)
        torch.save(whole, path)
    with pytest.raises(ValueError):
        load_pair(tmp_path)
    result = ended(specdec, ["def", "--checkpoint", tmp_path, "--device", "cpu"], capsys)
    assert is_one_clear_line(result)


class Trap:
    """What a harmful checkpoint may hold: loading it calls a function, here to make a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_loading_a_checkpoint_runs_no_code_of_its_own(tmp_path):
    pair_path(tmp_path).write_bytes(saved({"target": Trap(tmp_path / "sprung")}))
    with pytest.raises(ValueError):
        load_pair(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_file_that_cannot_be_read_is_not_called_broken(tmp_path):
    """To train again would not help."""
    (tmp_path / "pair.pt").mkdir()
    with pytest.raises(OSError):
        load_pair(tmp_path)


def test_a_directory_without_a_pair_is_one_clear_line(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="--preset tiny or base, --out DIR"):
        load_pair(tmp_path / "none")
    result = ended(specdec, ["def", "--checkpoint", tmp_path / "none", "--device", "cpu"], capsys)
    assert is_one_clear_line(result, "none")


# ---------------------------------------------------------------- vocabularies differ

def other_pair(what):
    """The micro pair with something of another vocabulary in it."""
    pair = micro_pair()
    size, name = pair.encoding.n_vocab, pair.encoding.name

    def model(vocab_size=size, tokenizer=name):
        return GPT(Config(vocab_size, context=64, n_head=2, n_embd=8, tokenizer=tokenizer))

    target, draft, encoding = model(), model(), pair.encoding
    if what == "fewer rows in the draft":
        draft = model(size - 16)
    elif what == "draft of another tokenizer":
        draft = model(tokenizer="other")
    elif what == "both of another tokenizer":
        encoding = train_tokenizer([SOURCE.swapcase()], size)
    elif what == "more rows than tokens":
        target, draft = model(size + 16), model(size + 16)
    return Pair(target, draft, encoding, {}, ["a prompt"], pair.corpus, 4)


@pytest.mark.parametrize("what", ("fewer rows in the draft", "draft of another tokenizer",
                                  "both of another tokenizer", "more rows than tokens"))
def test_models_of_different_vocabularies_are_refused(what, tmp_path, monkeypatch, capsys):
    """Before anything is generated."""
    save_pair(other_pair("nothing"), tmp_path)
    load_pair(tmp_path)
    save_pair(other_pair(what), tmp_path)
    monkeypatch.setattr(GPT, "forward", forbidden)
    result = ended(specdec, ["--checkpoint", tmp_path, "--device", DEVICE.type], capsys)
    assert is_one_clear_line(result, "vocabularies differ")


# ---------------------------------------------------------------- device, number format, threads

def test_nothing_asks_about_cuda_where_the_device_is_the_cpu(tmp_path, monkeypatch, capsys):
    save_pair(micro_pair(), tmp_path)
    for name in ("is_available", "device_count", "current_device", "get_device_name", "synchronize",
                 "is_bf16_supported", "get_device_capability", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    assert pick_device("cpu") == torch.device("cpu")
    specdec.main(["def", "--max-new", "3", "--checkpoint", str(tmp_path), "--device", "cpu"])
    assert "tokens/s" in capsys.readouterr().out
    with pytest.raises(AssertionError):  # it would be seen
        pick_device("cuda")


@pytest.mark.parametrize("there", (True, False))
def test_the_device_is_cuda_where_there_is_one(there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device().type == ("cuda" if there else "cpu")
    assert pick_device("cpu").type == "cpu"
    if there:
        assert pick_device("cuda").type == "cuda"


@pytest.mark.parametrize("program", (specdec, train_tiny), ids=("specdec", "train_tiny"))
@pytest.mark.parametrize("device, said", [("cuda", "there is no device 'cuda' here: use cpu"),
                                          ("tpu", "there is no device 'tpu' here: use cpu"),
                                          ("", "--device is empty")])
def test_a_device_that_is_not_there_is_one_clear_line(program, device, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(GPT, "forward", forbidden)
    assert is_one_clear_line(ended(program, ["--device", device], capsys), said)


@pytest.mark.parametrize("features, dtype", [
    ({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16),
    ({"avx512_bf16": False, "amx_bf16": True, "avx2": True}, torch.bfloat16),
    ({"avx512_bf16": False, "amx_bf16": False, "avx2": True, "avx512_f": True}, torch.float32),
    ({}, torch.float32)], ids=str)
def test_the_number_format_is_what_the_processor_says(features, dtype, tmp_path, monkeypatch):
    """The same every time: no clock is asked. On a CPU the products of a model of less than 384
    columns are too small to gain by it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    for clock in ("time", "perf_counter", "monotonic", "process_time"):
        monkeypatch.setattr(f"time.{clock}", forbidden)
    assert {fast_dtype(torch.device("cpu")) for _ in range(3)} == {dtype}
    pair = micro_pair()
    wide, narrow = (GPT(replace(pair.target.config, context=8, n_layer=1, n_head=4, n_embd=width))
                    for width in (384, 380))
    save_pair(replace(pair, target=wide, draft=narrow), tmp_path)
    loaded = load_pair(tmp_path)
    assert (loaded.target.embed.dtype, loaded.draft.embed.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("native, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_the_number_format_of_a_gpu_is_a_native_one(native, dtype, monkeypatch):
    """What it would have to emulate is slow."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: including_emulation or native)
    assert fast_dtype(torch.device("cuda")) == dtype


@pytest.mark.parametrize("cores, threads", [(1, 1), (2, 2), (64, 2), (None, 1)])
def test_threads_are_two_at_most_unless_asked_for(cores, threads, monkeypatch):
    monkeypatch.setattr(pair_module.os, "cpu_count", lambda: cores)
    assert pick_threads() == threads
    assert [pick_threads(asked) for asked in (1, 3, 1024)] == [1, 3, 1024]


@pytest.mark.parametrize("asked", (0, -1, 1025, 100_000))
def test_a_number_of_threads_out_of_range_is_refused(asked):
    with pytest.raises(ValueError, match="threads must be from 1 to 1024"):
        pick_threads(asked)
