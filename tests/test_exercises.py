"""The coursework grades right: each answer passes, each wrong one fails with words that say why.

Answers stand in exercises/teacher. Where that folder has been removed, as a teacher does before the
project is handed out, there are fewer cases.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exercises import exercises, ladder_checks, stand_ins
from exercises.checks import CHECKS
from exercises.grading import Failure, graded, is_written, law
from micro import ended
from programs import decode, trace

ROOT = Path(__file__).resolve().parent.parent
TEACHER = ROOT / "exercises" / "teacher"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in TEACHER.glob("*.py")}
STEPS = stand_ins.STEPS


def wrong(name):
    """[(exercise or step, old lines, new lines, words of the failure)]."""
    if name not in SOURCES:
        return []
    cases = runpy.run_path(str(TEACHER / f"{name}.py"))["WRONG"]
    return [(exercise, *case) for exercise, of_it in cases.items() for case in of_it]


def names_of(source, file):
    """The names that a student's file has when it is filled in like this."""
    names = {}
    exec(compile(source, file, "exec"), names)
    return names


def mutated(source, name, old, new, file):
    """The same where in the function or class `name` the lines `old` are replaced."""
    start = re.search(rf"^(def|class) {name}\b", source, re.MULTILINE).start()
    assert old in source[start:], f"{name} has no lines {old!r}"
    return names_of(source[:start] + source[start:].replace(old, new, 1), file)


with_answers = pytest.mark.skipif("answers" not in SOURCES, reason="no answers, no cases")
TEN, LADDER = wrong("wrong"), wrong("ladder_wrong")


def ids(cases):
    return [f"{name}: {' '.join(new.split())[:50]}" for name, _, new, _ in cases]


# ---------------------------------------------------------------- the ten

@with_answers
@pytest.mark.parametrize("name", CHECKS)
def test_an_answer_passes(name):
    answer = names_of(SOURCES["answers"], "exercises.py")[name]
    assert is_written(answer) and graded(name, CHECKS[name], answer) is None


@pytest.mark.parametrize("name, old, new, words", TEN, ids=ids(TEN))
def test_a_wrong_answer_fails_in_words(name, old, new, words):
    answer = mutated(SOURCES["answers"], name, old, new, "exercises.py")[name]
    sentence = graded(name, CHECKS[name], answer, seconds=2)
    assert sentence and words in sentence, sentence


# ---------------------------------------------------------------- the ladder

@with_answers
@pytest.mark.parametrize("name", [*STEPS, "together"])
def test_a_step_of_the_ladder_stands(name):
    student = names_of(SOURCES["ladder_answers"], "ladder.py")
    assert ladder_checks.grade(name, student) is None


@pytest.mark.parametrize("name, old, new, words", LADDER, ids=ids(LADDER))
def test_a_wrong_step_falls_in_words(name, old, new, words):
    student = mutated(SOURCES["ladder_answers"], name, old, new, "ladder.py")
    sentence = ladder_checks.grade(name, student, seconds=2)
    assert sentence and words in sentence, sentence


@with_answers
def test_a_step_is_graded_alone():
    """Among wrong steps a right one stands."""
    source = SOURCES["ladder_answers"].replace("p[i, x] / q[i, x]", "q[i, x] / p[i, x]")
    source = source.replace("cache.length = len(tokens) - 1\n    return", "return")
    student = names_of(source, "ladder.py")
    assert [bool(ladder_checks.grade(name, student)) for name in STEPS] == [
        name in ("verify_token", "commit") for name in STEPS]


@with_answers
def test_a_fault_in_the_draft_models_cache_costs_only_speed_and_is_told():
    student = mutated(SOURCES["ladder_answers"], "DraftModel", "tokens[self.cache.length:]",
                      "tokens[-1:] if self.cache.length else tokens", "ladder.py")
    sentence = ladder_checks.grade("together", student)
    assert "the right law, but takes" in sentence and "does the draft model read" in sentence


# ---------------------------------------------------------------- in the programs

@with_answers
@pytest.mark.parametrize("program", [decode, trace], ids=["decode", "trace"])
def test_the_programs_run_on_the_steps_of_a_student(program, kept, capsys, tmp_path):
    """The file of stubs, each of them filled in, and one left out: the reference does that."""
    stubs = (ROOT / "exercises" / "ladder.py").read_text(encoding="utf-8")
    answers = SOURCES["ladder_answers"].replace("\ndef feed(tokens, length, drafts):\n",
                                                "\ndef feed(*_):\n    raise NotImplementedError\n")
    mine = tmp_path / "mine.py"
    mine.write_text(answers + "if __name__" + stubs.rpartition("if __name__")[2], encoding="utf-8")
    with stand_ins.kept_as_it_was({}):
        page = ["--html", tmp_path / "page"] if program is trace else []
        code, out, err = ended(program, ["def", "--use", mine, "--verify", "mine", "--drafter",
                                         "mine", "--max-new", 8, *kept, *page], capsys)
    assert (code, err) == (0, "")
    assert "your steps: residual, verify_token, commit, DraftModel, one_round, spec" in out
    assert "tokens/s" in out or "wrote" in out


@pytest.mark.parametrize("option, name, answer", [
    ("--verify", "match", exercises.verify_match), ("--drafter", "ngram", exercises.ngram)])
def test_an_answer_that_is_not_written_is_said_in_one_line(option, name, answer, kept, capsys):
    use = ["def", "--use", ROOT / "exercises" / "exercises.py", "--max-new", 8, option, name]
    with stand_ins.kept_as_it_was({}):
        code, _, err = ended(decode, [*use, *kept], capsys)
    assert is_written(answer) or (code, err.count("\n")) == (2, 1) and "not written yet" in err


# ---------------------------------------------------------------- what cannot be fooled

def tosses(number):
    """A program that draws so many coins."""
    coin = torch.tensor([0.5, 0.5], dtype=torch.float64)
    return lambda choose: tuple(int(choose(coin)) for _ in range(number))


def test_too_many_draws_or_outcomes_fail_with_a_reason():
    """Three coins make eight outcomes: one too many for a bound of seven."""
    assert len(law(tosses(3), 8)) == 8
    with pytest.raises(Failure, match="more than 7 ways that the draws can fall"):
        law(tosses(3), 7)
    with pytest.raises(Failure, match="does its loop end"):
        law(tosses(10 ** 9))


def test_asserts_that_are_switched_off_let_nothing_pass():
    """PYTHONOPTIMIZE=1 takes assertions out: the grading does not rest on them."""
    source = ("from exercises.ladder_checks import grade\n"
              "print(grade('residual', {'residual': lambda p, q: (p - q).clamp(min=0)}))")
    run = subprocess.run([sys.executable, "-O", "-c", source], cwd=ROOT, text=True,
                         capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "it is not divided by its sum" in run.stdout, run.stderr
