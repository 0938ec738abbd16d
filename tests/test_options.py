"""programs/options.py: options, prompts and files, and how a program ends."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_tiny
from micro import DEVICE, MICRO, SOURCE, Micro, ended, is_one_clear_line, micro_pair
from model import GPT
from pair import load_pair, save_pair
from programs import bench, decode, options, trace
from programs.options import about, parser_of, prepared, printable
from rigs import forbidden
from train_tiny import Recipe
from variants import DRAFTERS, RULES
from vocabulary import END_OF_TEXT

ROOT = Path(options.__file__).resolve().parent.parent


def of_command_line(*arguments):
    """(pair, settings, tokens of the prompt)"""
    arguments = [str(argument) for argument in arguments]
    return prepared(parser_of("", arguments).parse_args(arguments))


# ---------------------------------------------------------------- what is refused

BAD = ("gamma=0 gamma=-3 temperature=-1 temperature=nan temperature=inf top-k=0 top-k=-1 top-p=0 "
       "top-p=-0.1 top-p=1.5 top-p=nan threads=0 max-new=0 device=tpu device= checkpoint= "
       "checkpoint=no/such use=no/such").split()


@pytest.mark.parametrize("asked", BAD)
def test_a_value_out_of_range_is_one_clear_line(asked, kept, tmp_path, monkeypatch, capsys):
    """Before any work, and earlier figures stay. An empty name, of a shell variable that is not
    set, asks for no default."""
    monkeypatch.setattr(GPT, "forward", forbidden)
    old, (option, value) = tmp_path / "old", asked.split("=")
    old.write_text("earlier figures", encoding="utf-8")
    word = value if option in ("checkpoint", "use") else option
    for program in (decode, trace) if option == "max-new" else (decode, bench):
        result = ended(program, [*kept, "--json", old, f"--{asked}"], capsys)
        assert is_one_clear_line(result, word)
    assert old.read_text(encoding="utf-8") == "earlier figures"


def test_a_file_that_cannot_be_written_is_said_before_the_work(kept, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(GPT, "forward", forbidden)
    for program, option in ((decode, "--json"), (trace, "--html"), (bench, "--json")):
        result = ended(program, [*kept, option, tmp_path / "none" / "file"], capsys)
        assert is_one_clear_line(result, "No such file")


# ---------------------------------------------------------------- the pair and the prompt

@pytest.mark.parametrize("typed", (END_OF_TEXT, f"a{END_OF_TEXT}b", "é🙂\0", "", None))
def test_a_prompt_is_taken_as_it_was_typed(typed, kept):
    """An empty one starts from the end of text, and where there is none held-out text is taken."""
    pair, _, tokens = of_command_line(*kept, *[typed] * (typed is not None))
    wanted = {"": END_OF_TEXT, None: micro_pair().prompts[0]}.get(typed, typed)
    assert pair.encoding.decode(tokens) == wanted
    assert (pair.encoding.eot_token in tokens) == (typed == "")


def test_a_fresh_clone_trains_a_pair_once_and_keeps_it(tmp_path, monkeypatch, capsys):
    """The default one, with all the threads that there are: --threads is for the decoding."""
    def train(recipe, documents, device, directory):
        given.append((recipe, documents, device.type, torch.get_num_threads()))
        save_pair(micro_pair(), directory)

    given = []
    (tmp_path / "tiny").mkdir()  # a first training was interrupted
    monkeypatch.setattr(options, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(options, "standard_library", lambda: [textwrap.__file__])
    monkeypatch.setattr(options, "train_pair", train)
    torch.set_num_threads(2)
    arguments = ["def", "--max-new", 4, "--device", DEVICE.type, "--threads", 1]
    (first, out, _), (second, later, _) = (ended(decode, arguments, capsys) for _ in range(2))
    assert first == second == 0 and given == [(Recipe(), [SOURCE], DEVICE.type, 2)]
    assert out.startswith("no trained pair yet: training one") and "no trained pair" not in later
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("asked, variable, threads", [
    ([], "", 1), ([], "1", 1), ([], "3", 3), (["--threads", 2], "3", 2)])
def test_one_thread_is_used_unless_more_are_asked_for(asked, variable, threads, kept, monkeypatch):
    """A command line is asked before the environment."""
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    pair, *_ = of_command_line(*kept[:2], "--device", "cpu", "--dtype", "float64", *asked)
    assert torch.get_num_threads() == threads
    words = f"cpu, target in float64, draft in float64, {threads} thread" + "s" * (threads > 1)
    assert about(pair)["machine"] == words


def test_a_file_of_ones_own_adds_a_rule_and_a_drafter(kept, monkeypatch, capsys):
    """None of its drafts stands: a pass a token."""
    for table in (RULES, DRAFTERS):
        monkeypatch.setitem(table, "mine", None)  # so that it is gone after the test
    mine = ["--use", ROOT / "examples/mine.py", "--verify", "mine", "--drafter", "mine"]
    code, out, err = ended(decode, ["def", *kept, "--max-new", 6, "--gamma", 2, *mine], capsys)
    assert (code, err) == (0, "") and "0 of 9 drafts kept, 5 corrections, 1 bonuses" in out


# ---------------------------------------------------------------- how a program ends

def test_bad_input_is_one_line_and_a_fault_of_the_program_a_traceback(monkeypatch, capsys):
    def end_of(error):
        monkeypatch.setattr(decode, "prepared", lambda _: exec("raise error", {"error": error}))
        return ended(decode, [], capsys)

    for error in (ValueError("too\x1b[31mhot"), OSError("too\x1b[31mhot")):
        assert is_one_clear_line(end_of(error), ": too\\x1b[31mhot\n")
    with pytest.raises(ZeroDivisionError):
        end_of(ZeroDivisionError())
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))  # python -X dev
    with pytest.raises(ValueError):
        end_of(ValueError())


def test_an_interrupted_decoding_ends_without_a_traceback(kept, monkeypatch, capsys):
    monkeypatch.setattr(GPT, "forward", lambda *_: signal.raise_signal(signal.SIGINT))
    code, out, err = ended(decode, ["def", *kept], capsys)
    assert (code, err.strip()) == (130, "interrupted") and out.endswith("def")


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_a_program_called_by_a_link_writes_plain_text_into_a_pipe(kept, tmp_path):
    """From another directory, where a file has the name of a module of ours."""
    (tmp_path / "link.py").symlink_to(ROOT / "specdec.py")
    (tmp_path / "model.py").touch()
    command = [sys.executable, tmp_path / "link.py", "def é🙂", *kept, "--max-new", 9]
    ran = subprocess.run(map(str, command), env={**os.environ, "PYTHONIOENCODING": "utf-8"},
                         capture_output=True, encoding="utf-8", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "def é🙂" in ran.stdout and "tokens a pass" in ran.stdout and "\x1b" not in ran.stdout


# ---------------------------------------------------------------- what reaches a terminal

# A colour, a word for the clipboard, a wiped screen, and text that runs backwards.
ESCAPES = "\x1b[31m\x1b]52;c;aGk=\x07\x9b2J\u202e"


def is_harmless(text):
    """Is there no character in it that commands a terminal?"""
    return all(c.isprintable() or c in "\n\t\u200c\u200d" for c in text)


def test_no_character_commands_a_terminal_and_text_of_any_script_is_shown():
    assert is_harmless(printable("".join(map(chr, range(0x30000)))))
    assert printable("a\nb\tc") == "a\nb\tc"
    assert printable(ESCAPES) == "\\x1b[31m\\x1b]52;c;aGk=\\x07\\x9b2J\\u202e"
    for text in ("é🙂日本", "हिन्दी कहानी", "👩‍👩‍👧", "e\u0301", "กำลัง"):
        assert printable(text) == text


@pytest.mark.parametrize("prompt", ([], [f"{ESCAPES} def"]), ids=("held-out", "typed"))
def test_what_a_model_reads_and_writes_is_harmless(prompt, tmp_path, capsys):
    """Its corpus may hold commands. Hot, it writes control characters by itself."""
    save_pair(replace(micro_pair(), prompts=[f"{ESCAPES} def"]), tmp_path)
    options = ["--max-new", 60, "--temperature", 100, "--checkpoint", tmp_path, "--device", "cpu"]
    code, out, err = ended(decode, [*prompt, *options], capsys)
    assert (code, err) == (0, "") and "\\x1b[31m" in out and is_harmless(out)
    assert len(set(re.findall(r"\\x..", out))) > 5


def test_an_output_of_few_characters_gets_what_it_can_show(kept, tmp_path, monkeypatch):
    """Of a training and a text. And no network is needed for them."""
    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, forbidden)
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(options, "Recipe", Micro)
    out = tmp_path / "組 é"
    train_tiny.main(["--data", textwrap.__file__, "--device", "cpu", "--out", str(out)])
    decode.main(["é🙂日本", *map(str, kept), "--max-new", "2"])
    pipe.flush()
    shown = pipe.buffer.getvalue().decode("cp1252")
    assert "? é" in shown and "tokens a pass" in shown
    assert load_pair(out).minutes == MICRO.minutes
