"""The edges of the programs: empty names, full disks, terminals, pipes and Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import bench
import specdec
import trace
import train_tiny
from pair import load_pair, save_pair
from program import coloured, edges, visible
from rigs import ended, forbidden, is_one_clear_line, micro_pair

PROGRAMS = {"specdec": specdec, "trace": trace, "bench": bench, "train_tiny": train_tiny}
every_program = pytest.mark.parametrize("name", PROGRAMS)
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and named pipes of POSIX")
# A colour, a word for the clipboard, a wiped screen, and text that runs backwards.
ESCAPES = "\x1b[31m\x1b]52;c;aGk=\x07\x9b2J\u202e"


def is_harmless(text):
    """Is there no character in it that commands a terminal?"""
    return all(c.isprintable() or c in "\n\t\u200c\u200d" for c in text)


@pytest.fixture(autouse=True)
def sigint():
    """Ctrl-C is what it was, whatever a test makes of it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def hostile(tmp_path):
    """A pair with commands to the terminal in its prompts and notes."""
    pair = replace(micro_pair(), prompts=[f"{ESCAPES} def"], notes=[ESCAPES])
    save_pair(pair, tmp_path / "hostile")
    return ["--checkpoint", tmp_path / "hostile", "--device", "cpu"]


# ---------------------------------------------------------------- what is refused before the work

EMPTY = [(specdec, "checkpoint"), (specdec, "json"), (specdec, "device"), (trace, "html"),
         (trace, "checkpoint"), (bench, "svg"), (bench, "json"), (bench, "checkpoint"),
         (train_tiny, "out"), (train_tiny, "data"), (train_tiny, "device")]


@pytest.mark.parametrize("program, option", EMPTY, ids=lambda x: getattr(x, "__name__", x))
def test_an_empty_name_is_no_default(program, option, monkeypatch, capsys):
    """A shell variable that is not set: "$OUT" would overwrite the default pair."""
    monkeypatch.setattr(sys.modules["program"], "load_pair", forbidden)
    monkeypatch.setattr(train_tiny, "train_and_keep", forbidden)
    assert is_one_clear_line(ended(program, [f"--{option}="], capsys), f"--{option} is empty")


def test_an_empty_name_among_others_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(train_tiny, "train_and_keep", forbidden)
    result = ended(train_tiny, ["--data", textwrap.__file__, ""], capsys)
    assert is_one_clear_line(result, "--data is empty")


RESULTS = [(specdec, "json"), (trace, "json"), (trace, "html"), (bench, "json"), (bench, "svg")]


@pytest.mark.parametrize("program, option", RESULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_place_that_takes_no_results_is_refused_before_the_work(program, option, kept, tmp_path,
                                                                  monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["program"], "load_pair", forbidden)
    for place in (tmp_path, tmp_path / "no such directory" / "results"):
        result = ended(program, [*kept, f"--{option}", place], capsys)
        assert is_one_clear_line(result, str(place))


def test_earlier_results_stay_until_there_are_others(tmp_path, capsys):
    old = tmp_path / "old"
    old.write_text("earlier figures", encoding="utf-8")
    arguments = ["--checkpoint", tmp_path / "none", "--json", old]
    assert is_one_clear_line(ended(specdec, arguments, capsys), "no trained pair")
    assert old.read_text(encoding="utf-8") == "earlier figures"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_results_that_no_longer_fit_are_one_clear_line(kept, capsys):
    code, _, err = ended(specdec, ["def", *kept, "--max-new", "0", "--json", "/dev/full"], capsys)
    assert code == 2 and err.count("\n") == 1 and "No space left" in err


# ---------------------------------------------------------------- how a program ends

def end_of(work):
    """The exit code of a program that does this."""
    try:
        with edges():
            work()
    except SystemExit as end:
        return end.code
    except KeyboardInterrupt:
        return "a traceback"
    return 0


def raiser(error):
    def work():
        raise error
    return work


@pytest.mark.parametrize("error", (ValueError("too hot"), OSError("too hot")), ids=repr)
def test_bad_input_is_one_line_with_the_name_of_the_program(error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/some/where/specdec.py"])
    assert end_of(raiser(error)) == 2
    assert capsys.readouterr() == ("", "specdec.py: too hot\n")


def test_bad_input_ends_with_2_also_where_nobody_reads_why(monkeypatch):
    def write(text):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    assert end_of(raiser(ValueError("too hot"))) == 2


def test_an_error_of_the_program_itself_shows_its_traceback():
    with pytest.raises(ZeroDivisionError):
        end_of(lambda: 1 / 0)


def test_the_traceback_of_bad_input_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))
    with pytest.raises(ValueError):
        end_of(raiser(ValueError()))


def interrupted():
    signal.raise_signal(signal.SIGINT)


class Impatient(io.StringIO):
    """An output: whenever it is written to, Ctrl-C comes once more."""

    def write(self, text):
        interrupted()
        return super().write(text)


def test_ctrl_c_is_one_line_and_the_second_is_ignored(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Impatient())
    assert end_of(interrupted) == 130
    assert sys.stdout.getvalue() == "\ninterrupted\n"


def mine(*_):
    """An answer to Ctrl-C."""


@pytest.mark.parametrize("work", (lambda: None, raiser(ValueError()), raiser(BrokenPipeError())),
                         ids=("done", "bad input", "reader gone"))
def test_ctrl_c_is_afterwards_what_it_was(work, capsys):
    """A notebook goes on."""
    signal.signal(signal.SIGINT, mine)
    end_of(work)
    assert signal.getsignal(signal.SIGINT) is mine


class Unread(io.StringIO):
    """An output that takes what is written, and finds only when flushed that nobody reads."""

    def flush(self):
        raise BrokenPipeError

    def fileno(self):
        return os.open(os.devnull, os.O_WRONLY)


def test_a_reader_that_has_gone_is_noticed_at_the_end(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Unread())
    assert end_of(lambda: print("a short text")) == 141


def test_a_prompt_of_python_can_be_interrupted_again(monkeypatch, capsys):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    signal.signal(signal.SIGINT, mine)
    assert end_of(interrupted) == 130
    assert signal.getsignal(signal.SIGINT) is mine


# ---------------------------------------------------------------- Ctrl-C and pipes, in processes

SERVER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import bench, specdec, trace, train_tiny
for line in sys.stdin:
    case = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
reader, writer = os.pipe()
os.close(reader)
os.dup2(os.open(case["out"], os.O_WRONLY) if case["out"] else writer, 1)
os.dup2(os.open(case["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
sys.argv = [case["name"] + ".py", *case["arguments"]]
sys.modules[case["name"]].main()
"""


class Processes:
    """Starts programs as processes of their own, one after another: forks of one that has imported
    torch, which takes long."""

    def __init__(self, directory):
        self.err = directory / "err"
        command = [sys.executable, "-c", SERVER, Path(specdec.__file__).parent]
        usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=usual)

    def start(self, name, *arguments, out=None):
        """Returns the number of the process. out: a file; None is a pipe that nobody reads."""
        case = {"name": name, "arguments": [str(argument) for argument in arguments],
                "out": out and str(out), "err": str(self.err)}
        print(json.dumps(case), file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def end(self):
        """(exit code, stderr) of the process that was started."""
        return int(self.server.stdout.readline()), self.err.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    started = Processes(tmp_path_factory.mktemp("processes"))
    yield started
    started.server.communicate()


def training(data, out):
    return ["train_tiny", "--data", data, "--device", "cpu", "--out", out]


def ctrl_c_twice(process):
    os.kill(process, signal.SIGINT)
    os.kill(process, signal.SIGINT)


@posix
def test_ctrl_c_twice_ends_reading_with_one_line(processes, tmp_path):
    """While --data waits for a named pipe. What a second Ctrl-C meets is chance: three trials."""
    os.mkfifo(tmp_path / "data")
    for trial in range(3):
        out = tmp_path / f"out{trial}"
        out.touch()
        process = processes.start(*training(tmp_path / "data", tmp_path), out=out)
        with open(tmp_path / "data", "w"):  # waits until the program opens it
            time.sleep(0.05)  # and a moment more, until it reads
            ctrl_c_twice(process)
            assert processes.end() == (130, "")
        assert out.read_text(encoding="utf-8") == "\ninterrupted\n"


@posix
def test_ctrl_c_twice_ends_training_with_one_line(processes, tmp_path):
    os.mkfifo(tmp_path / "out")
    process = processes.start(*training(textwrap.__file__, tmp_path / "kept"), out=tmp_path / "out")
    with open(tmp_path / "out", encoding="utf-8") as out:
        assert out.readline().startswith("corpus: ")
        ctrl_c_twice(process)
        assert out.read() == "\ninterrupted\n"
    assert processes.end() == (130, "")


@posix
@every_program
def test_a_reader_that_has_gone_is_no_error(name, kept, processes, tmp_path):
    """`| head -1`: nothing is said, and the code is that of a shell for a closed pipe."""
    arguments = kept if name != "train_tiny" else training(textwrap.__file__, tmp_path)[1:]
    processes.start(name, *arguments)
    assert processes.end() == (141, "")


@posix
def test_bad_input_is_told_though_nobody_reads_the_output(hostile, processes):
    """The note of the pair is printed by then, and waits to be written."""
    processes.start("specdec", "1" * 600, *hostile)
    code, err = processes.end()
    assert code == 2 and err.startswith("specdec.py: the context of 512") and err.count("\n") == 1


@posix
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_under_the_output_is_one_line(kept, processes):
    processes.start("specdec", "def", *kept, "--max-new", "0", out="/dev/full")
    code, err = processes.end()
    assert code == 2 and err.startswith("specdec.py: ") and err.count("\n") == 1
    assert "No space left" in err


# ---------------------------------------------------------------- what reaches a terminal

def test_no_character_commands_a_terminal():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert visible(everything).isprintable() and is_harmless(visible(everything, lines=True))
    assert visible("a\nb\tc") == "a⏎b\\tc" and visible("a\nb\tc", lines=True) == "a\nb\tc"
    assert visible(ESCAPES) == "\\x1b[31m\\x1b]52;c;aGk=\\x07\\x9b2J\\u202e"


@pytest.mark.parametrize("text", ("é🙂日本", "हिन्दी कहानी", "👩‍👩‍👧", "e\u0301", "กำลัง"))
def test_text_of_any_script_is_shown_as_it_is(text):
    assert visible(text, lines=True) == text


@pytest.mark.parametrize("prompt", ([], [f"{ESCAPES} def"]), ids=("held-out", "typed"))
@pytest.mark.parametrize("program", (specdec, trace), ids=("specdec", "trace"))
def test_what_a_model_writes_and_reads_is_harmless(program, prompt, hostile, capsys):
    """Hot, it writes control characters too."""
    options = ["--max-new", "60", "--temperature", "100", *hostile]
    code, out, err = ended(program, [*prompt, *options], capsys)
    assert (code, err) == (0, "") and out.startswith("note: \\x1b[31m") and is_harmless(out)
    assert len(set("".join(out.split("\\x")[i][:2] for i in range(1, 9)))) > 1


def test_what_bench_says_of_a_pair_is_harmless(hostile, monkeypatch, capsys):
    monkeypatch.setattr(bench, "bench", lambda *_: {})
    code, out, err = ended(bench, hostile, capsys)
    assert (code, err) == (0, "") and out.startswith("note: \\x1b[31m") and is_harmless(out)


@every_program
def test_the_name_of_a_file_is_harmless(name, kept, tmp_path, micro_preset, monkeypatch, capsys):
    bad, device = tmp_path / ESCAPES, ["--device", "cpu"]
    trials = [[*kept, "--json", bad / "x"], ["--checkpoint", bad, *device]]
    if name == "trace":
        trials += [[*kept, "--html", bad / "x"], [*kept, "--max-new", "1", "--html", bad]]
    if name == "train_tiny":
        monkeypatch.setattr(train_tiny, "train_pair", lambda *_: micro_pair())
        trials = [["--data", bad, *device], ["--data", textwrap.__file__, *device, "--out", bad]]
    for arguments in trials:
        _, out, err = ended(PROGRAMS[name], arguments, capsys)
        assert "\\x1b[31m" in out + err and is_harmless(out + err)


@pytest.mark.parametrize("encoding", ("ascii", "cp1252"))
def test_an_output_of_few_characters_gets_what_it_can_show(encoding, kept, tmp_path, micro_preset,
                                                           monkeypatch):
    pipe = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(train_tiny, "train_pair", lambda *_: micro_pair())
    train_tiny.main([str(part) for part in training(textwrap.__file__, tmp_path / "組 é")[1:]])
    trace.main(["é🙂日本\n", "--max-new", "2", *map(str, kept)])
    pipe.flush()
    shown = pipe.buffer.getvalue().decode(encoding)
    assert ("? é" if encoding == "cp1252" else "? ?") in shown and "so far: 2 tokens" in shown
    assert load_pair(tmp_path / "組 é").prompts == micro_pair().prompts


def test_a_closed_output_stops_no_program(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    for one in (specdec, trace):
        file = tmp_path / f"{one.__name__}.json"
        one.main([str(part) for part in ("def", *kept, "--max-new", "2", "--json", file)])
        assert json.loads(file.read_text(encoding="utf-8"))["rounds"]


def test_an_output_of_a_notebook_needs_no_encoding(kept, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    specdec.main([str(part) for part in ("déf", *kept, "--max-new", "2")])
    assert sys.stdout.getvalue().startswith("déf")


@pytest.mark.parametrize("terminal, term, no_color, expected", [
    (True, "xterm", None, True), (True, "xterm", "", True), (True, None, None, True),
    (False, "xterm", None, False), (True, "dumb", None, False), (True, "xterm", "1", False)])
def test_colours_are_for_terminals_that_have_them(terminal, term, no_color, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    for variable, value in (("TERM", term), ("NO_COLOR", no_color)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert coloured("a", "draft") == ("\x1b[32ma\x1b[0m" if expected else "a")
    assert coloured("a", "prompt") == "a"
