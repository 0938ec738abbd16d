"""The command line: what is printed, what is refused, and what a terminal, a pipe and a file each get."""

import functools
import io
import json
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import specdec
import train_tiny
from model import GPT
from rigs import DEVICE, MICRO, ended, forbidden, is_one_clear_line, micro_pair
from sampling import warp
from specdec import decode_plain, decode_speculative
from train_tiny import load_pair, pair_path, save_pair

PROGRAM = Path(specdec.__file__)
ESCAPE = "\x1b"


@pytest.fixture
def kept(tmp_path):
    """The arguments that name a small trained pair."""
    save_pair(micro_pair(), tmp_path / "kept")
    return ["--checkpoint", tmp_path / "kept", "--device", DEVICE.type, "--dtype", "float32"]


def strict(path):
    """A JSON file without NaN or infinity, which only some programs can read."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def written(out):
    """What a run printed of the text itself, without the comparison after it."""
    return re.split(r"\n+ +tokens/s", out)[0]


# ---------------------------------------------------------------- what is refused

@pytest.mark.parametrize("option, value", [
    *(("gamma", value) for value in ("0", "-3")), *(("temperature", value) for value in ("-1", "nan", "inf", "-inf")),
    *(("top-k", value) for value in ("0", "-1")), *(("top-p", value) for value in ("0", "-0.1", "1.5", "nan", "inf")),
    ("max-new", "-1"), ("seed", str(2 ** 64)), ("seed", str(-2 ** 64)), ("device", "tpu")])
def test_a_value_out_of_range_is_one_clear_line_before_any_work(option, value, kept, monkeypatch, capsys):
    monkeypatch.setattr(GPT, "forward", forbidden)
    assert is_one_clear_line(ended(specdec, ["def", *kept, f"--{option}={value}"], capsys), option)


@pytest.mark.parametrize("option, value", [
    ("gamma", "four"), ("temperature", "hot"), ("verify", "none"), ("drafter", "me")])
def test_a_value_that_is_not_one_names_its_option(option, value, kept, capsys):
    code, out, err = ended(specdec, ["def", *kept, f"--{option}={value}"], capsys)
    assert (code, out) == (2, "") and f"--{option}" in err and "Traceback" not in err


def test_a_text_longer_than_the_context_is_one_clear_line(kept, monkeypatch, capsys):
    monkeypatch.setattr(GPT, "forward", forbidden)
    for prompt, max_new in (("1" * 510, 4), ("def", 600), ("1" * 600, 0)):
        code, _, err = ended(specdec, [prompt, *kept, "--max-new", max_new], capsys)
        assert code == 2 and err.count("\n") == 1 and "context of 512" in err


def test_a_file_for_the_figures_that_cannot_be_written_is_one_clear_line(kept, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "no such directory" / "figures.json"):
        code, _, err = ended(specdec, ["def", *kept, "--max-new", 2, "--json", path], capsys)
        assert code == 2 and err.count("\n") == 1 and path.name in err


# ---------------------------------------------------------------- what is decoded

@pytest.mark.parametrize("options", [
    [], ["--temperature", "0"], ["--temperature", "0.7", "--top-k", "20", "--top-p", "0.9"], ["--drafter", "lookup"],
    ["--verify", "block", "--gamma", "1"], ["--seed", "7"]], ids=" ".join)
def test_the_text_printed_is_the_text_decoded(options, kept, capsys):
    code, out, err = ended(specdec, ["def wrap(", *kept, "--max-new", "12", *options], capsys)
    assert (code, err) == (0, "")
    given = specdec.parse([*map(str, kept), *options])
    shape = functools.partial(warp, temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    pair = load_pair(given.checkpoint, DEVICE, torch.float32)
    eos = pair.encoding.eot_token
    rounds = decode_speculative(pair, pair.encoding.encode_ordinary("def wrap("), 12, given.gamma, shape, given.seed,
                                given.drafter, given.verify, eos)
    text = pair.encoding.decode([token for one in rounds for token in one.new if token != eos])
    assert written(out) == "def wrap(" + specdec.without_controls(text)


def test_the_default_seed_gives_the_same_text_again_and_another_seed_another(kept, capsys):
    texts = [written(ended(specdec, ["def", *kept, "--max-new", "20", *seed], capsys)[1])
             for seed in ([], ["--seed", "0"], ["--seed", "1"])]
    assert texts[0] == texts[1] != texts[2]


def test_greedy_text_is_the_one_of_plain_decoding(kept, capsys):
    _, out, _ = ended(specdec, ["def", *kept[:-1], "float64", "--max-new", "20", "--temperature", "0"], capsys)
    pair = load_pair(kept[1], DEVICE, torch.float64)
    greedy = functools.partial(warp, temperature=0)
    ids = list(decode_plain(pair, pair.encoding.encode_ordinary("def"), 20, greedy, 0, pair.encoding.eot_token))
    assert written(out) == "def" + specdec.without_controls(pair.encoding.decode(ids).removesuffix("<|endoftext|>"))


@pytest.mark.parametrize("arguments", [
    ["1" * 510, "--max-new", "3"], ["1" * 512, "--max-new", "1"],  # these fill the context to the last token
    ["1", "--max-new", "4", "--gamma", "1000"], ["1", "--max-new", "1"], ["1", "--max-new", "0"],
    ["1", "--max-new", "4", "--drafter", "lookup"], ["", "--max-new", "4"], ["é🙂\0", "--max-new", "4"]],
    ids=("all but three", "all but one", "large gamma", "one token", "no token", "lookup", "empty prompt", "odd prompt"))
def test_what_fits_is_decoded_and_measured(arguments, kept, tmp_path, capsys):
    code, out, err = ended(specdec, [*arguments, *kept, "--json", tmp_path / "figures.json"], capsys)
    assert (code, err) == (0, "") and out.startswith(arguments[0])
    strict(tmp_path / "figures.json")


def test_without_a_prompt_held_out_text_is_continued(kept, capsys):
    code, out, _ = ended(specdec, [*kept, "--max-new", "2"], capsys)
    assert code == 0 and out.startswith(micro_pair().prompts[0])


# ---------------------------------------------------------------- the figures

def test_the_figures_in_the_file_are_consistent_with_one_another(kept, tmp_path, capsys):
    path = tmp_path / "figures.json"
    _, out, _ = ended(specdec, ["def", *kept, "--max-new", "30", "--json", path], capsys)
    row = strict(path)
    assert row["new_tokens"] == row["plain_new_tokens"] == 30 and row["accepted"] <= row["tested"] <= row["drafted"]
    assert row["tokens_per_pass"] == row["new_tokens"] / row["passes"]
    assert row["alpha"] == row["accepted"] / row["tested"]
    assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
    assert min(row["c"], row["v"], row["predicted"], row["plain_tokens_per_s"], row["speculative_tokens_per_s"]) > 0
    for figure in (f"{row['accepted']}/{row['tested']}", f"{row['tokens_per_pass']:.2f}", f"{row['speedup']:.2f}x"):
        assert figure in out


def test_the_bench_measures_every_gamma_and_gives_figures_that_are_consistent(kept, tmp_path, capsys):
    saved = torch.load(pair_path(kept[1]), weights_only=True)
    saved["prompts"] = saved["prompts"][:2]
    saved["target"]["config"]["context"] = saved["draft"]["config"]["context"] = 32  # short texts: a quick bench
    torch.save(saved, pair_path(kept[1]))
    arguments = [*kept[:-1], "float64", "--bench", "--json", tmp_path / "figures.json"]
    code, out, err = ended(specdec, arguments, capsys)
    figures = strict(tmp_path / "figures.json")
    assert (code, err) == (0, "") and ESCAPE not in out
    gammas = defaultdict(list)
    for row in figures["rows"]:
        gammas[row["drafter"], row["verify"], row["temperature"]].append(row["gamma"])
    assert len(gammas) > 1 and all(listed == list(range(1, 9)) for listed in gammas.values())
    for row in figures["rows"]:
        assert row["new_tokens"] == row["plain_new_tokens"] == 2 * 16 == row["accepted"] + row["passes"]
        if row["temperature"] == 0:  # nothing is left to chance: each token's acceptance tells the passes
            assert row["expected"] == pytest.approx(row["tokens_per_pass"], rel=1e-9)
        assert row["accepted"] <= row["tested"] <= row["drafted"] <= row["gamma"] * row["passes"]
        assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
    assert 0 < figures["alpha"] < 1 and figures["c"] > 0 and figures["v"] > 0


# ---------------------------------------------------------------- terminal, pipe, file

def test_colours_are_for_terminals_alone_and_not_where_no_color_is_set(kept, monkeypatch, capsys):
    def text():
        return written(ended(specdec, ["def", *kept, "--max-new", "12"], capsys)[1])

    monkeypatch.delenv("NO_COLOR", raising=False)
    piped = text()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    coloured = text()
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE in coloured and ESCAPE not in piped
    assert re.sub(ESCAPE + r"\[\d+m", "", coloured) == piped == text()


@pytest.mark.parametrize("encoding", ("ascii", "cp1252"))
def test_a_pipe_that_cannot_hold_a_character_does_not_stop_the_program(encoding, kept, monkeypatch):
    """The pipes of Windows: the text may hold any character, and U+FFFD for bytes that are none."""
    pipe = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", pipe)
    specdec.main(["é🙂日本", *map(str, kept), "--max-new", "2"])
    pipe.flush()
    assert b"accepted/tested" in pipe.buffer.getvalue()


def test_a_process_in_a_pipe_prints_plain_text_and_ends_well(kept):
    command = [sys.executable, PROGRAM, "def é🙂", *kept, "--max-new", "9"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("def é🙂") and "accepted/tested" in done.stdout
    assert ESCAPE not in done.stdout and "\r" not in done.stdout


# ---------------------------------------------------------------- a fresh clone, and training

def test_a_fresh_clone_trains_a_pair_once_keeps_it_and_decodes(tmp_path, micro_preset, monkeypatch, capsys):
    monkeypatch.setattr(specdec, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(specdec, "standard_library", lambda: [textwrap.__file__])
    arguments = ["def", "--max-new", "4", "--device", DEVICE.type, "--dtype", "float32"]
    first, second = (ended(specdec, arguments, capsys) for _ in range(2))
    assert first[0] == second[0] == 0
    assert "no trained pair yet" in first[1] and pair_path(tmp_path / "checkpoints" / "tiny").exists()
    assert second[1].startswith("def")


def test_a_pair_trained_on_a_text_of_ones_own_is_kept_where_it_is_asked_to_be(tmp_path, micro_preset, capsys):
    mine, device = tmp_path / "mine", ["--device", DEVICE.type]
    code, out, err = ended(train_tiny, ["--data", textwrap.__file__, "--out", mine, *device], capsys)
    assert (code, err) == (0, "") and str(pair_path(mine)) in out
    assert f"step {MICRO.steps[0]}/{MICRO.steps[0]}" in out and "left" in out
    assert ESCAPE not in out and "\r" not in out  # these are for terminals
    assert ended(specdec, ["def", "--max-new", "4", "--checkpoint", mine, *device], capsys)[0] == 0


def test_an_interrupted_decoding_ends_without_a_traceback(kept, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(GPT, "forward", interrupt)
    code, out, err = ended(specdec, ["def", *kept], capsys)
    assert code == 130 and "interrupted" in out and err == ""
