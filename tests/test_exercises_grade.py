"""The checks of the exercises grade right: every reference answer passes, and every wrong answer
fails, with the words that say why.

Nothing else needs the two files of answers. Where they have been deleted, as a teacher does before
the project is handed out, there are no cases to collect.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch

EXERCISES = Path(__file__).resolve().parent.parent / "exercises"
sys.path.append(str(EXERCISES))

from checks import CHECKS, law

have_answers = all((EXERCISES / f"{name}.py").exists() for name in ("answers", "wrong_answers"))
ANSWERS = importlib.import_module("answers") if have_answers else None
WRONG = importlib.import_module("wrong_answers").WRONG if have_answers else []


@pytest.mark.parametrize("name", CHECKS if have_answers else [])
def test_the_reference_answer_passes(name):
    CHECKS[name](getattr(ANSWERS, name))


@pytest.mark.parametrize("name, answer, words", WRONG,
                         ids=[answer.__name__ for _, answer, _ in WRONG])
def test_a_wrong_answer_fails_in_words(name, answer, words):
    """An assertion's own words or, of an answer that crashes, those of the crash."""
    with pytest.raises(Exception) as failure:
        CHECKS[name](answer)
    assert words in str(failure.value)


@pytest.mark.parametrize("name", CHECKS if have_answers else [])
def test_each_exercise_has_six_wrong_answers(name):
    """Each with one line that says what is wrong."""
    answers = [answer for exercise, answer, _ in WRONG if exercise == name]
    assert len(answers) >= 6
    assert all(answer.__doc__.strip() and "\n" not in answer.__doc__ for answer in answers)


def test_too_many_outcomes_fail_with_a_reason():
    """Three coins make eight outcomes: one too many for a bound of seven."""
    coin = torch.tensor([0.5, 0.5])

    def three_coins(choose):
        return tuple(int(choose(coin)) for _ in range(3))

    assert len(law(three_coins, 8)) == 8
    with pytest.raises(AssertionError, match="more than 7 ways that the draws can fall"):
        law(three_coins, 7)


def test_a_loop_that_never_ends_fails_with_a_reason():
    """A run that draws again and again is stopped while it runs."""
    def endless(choose):
        while True:
            choose(torch.tensor([1.0]))

    with pytest.raises(AssertionError, match="does its loop end"):
        law(endless, 1)
