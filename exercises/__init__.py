"""The coursework: ladder.py and exercises.py are a student's files, the others grade them."""

import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path += [str(root), str(root / "tests" / "law")]

from exact import expectation, law
from exercises.checks import DRAFT, TARGET, bias
from exercises.exercises import *  # after `from exercises import *` all of these are there to try
