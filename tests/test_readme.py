"""What the README shows is what there is: its code is the program's own, what it names exists."""

import inspect
import re
from pathlib import Path

import specdec

ROOT = Path(specdec.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_first_code_of_the_readme_is_algorithm_1():
    assert BLOCKS[0] == inspect.getsource(specdec.algorithm_1)


def test_the_recipe_of_the_readme_is_the_file_to_start_from():
    """From its first import on. The suite runs that file: see test_options.py."""
    mine = (ROOT / "examples/mine.py").read_text(encoding="utf-8")
    assert BLOCKS[1] in mine


def test_every_file_and_module_that_the_readme_names_is_there():
    named = re.findall(r"\]\((\S+?)\)", README)
    named += re.findall(r"`([\w./]+(?:\.py|law\.html|\.md|\.svg|/))`", README)
    named += [f"programs/{name}.py" for name in re.findall(r"python -m programs\.(\w+)", README)]
    missing = [name for name in named if not (ROOT / name).exists()]
    assert named and not missing, f"the README names {missing}"


def test_the_readme_is_short():
    assert len(README.split()) <= 1700, f"{len(README.split())} words, and 1,700 are the most"
