"""Grades exercises.py:   python -m pytest exercises

An exercise that still raises NotImplementedError is skipped; -rs lists those, and -k adaptive
grades one alone. A failure says in words, in its last lines, which condition was not met.
"""

import traceback

import pytest

import exercises
from checks import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_exercise(name):
    """The answer satisfies its check."""
    answer = getattr(exercises, name)
    try:
        CHECKS[name](answer)
    except NotImplementedError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code is not answer.__code__:  # raised by what the answer calls: a failure
            raise
        pytest.skip(f"not answered yet: {name}")
