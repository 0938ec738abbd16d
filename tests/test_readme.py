"""What the README shows is what there is: its code is the program's own, and it runs."""

import inspect
import re
import sys
from pathlib import Path

import pytest

import pair
import specdec
from rigs import micro_pair
from sampling import VERIFY

README = (Path(specdec.__file__).parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_first_code_of_the_readme_is_algorithm_1():
    assert BLOCKS[0] == inspect.getsource(specdec.algorithm_1)


@pytest.mark.parametrize("name, options, said", [
    ("load_pair", [], " accepted: "), ("verify_none", ["--verify", "none"], "draft 0,"),
    ("def repeat", ["--drafter", "repeat"], "accepted/tested")])
def test_the_readmes_scripts_run_as_they_stand(name, options, said, tmp_path, monkeypatch, capsys):
    (script,) = [block for block in BLOCKS if name in block]
    monkeypatch.chdir(tmp_path)
    directory = pair.save_pair(micro_pair(), Path("checkpoints/tiny")).parent
    monkeypatch.setattr(sys, "argv", ["mine.py", "def", *options, "--max-new", "9",
                                      "--checkpoint", str(directory), "--device", "cpu"])
    for table, name in ((VERIFY, "none"), (specdec.DRAFTERS, "repeat")):
        monkeypatch.setitem(table, name, None)  # taken out again after the test
    exec(script, {"__name__": "mine"})
    assert said in capsys.readouterr().out


def test_every_file_and_picture_that_the_readme_names_is_there():
    root = Path(specdec.__file__).parent
    named = re.findall(r"\]\((\S+?)\)", README)
    named += re.findall(r"`([\w./]+\.(?:py|html|md|svg))`", README)
    own = {"answers.py", "wrong_answers.py"}  # what a teacher deletes
    assert named and all((root / name).exists() or (root / "tests" / name).exists()
                         for name in named if name not in own)
