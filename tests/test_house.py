"""What holds of all files together: who imports whom, and how much there is."""

import ast
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
GROUND = {"sampling", "model", "vocabulary"}
BELOW = {**dict.fromkeys(GROUND, set()), "specdec": GROUND, "pair": GROUND,
         "train_tiny": GROUND | {"specdec", "pair"}, "variants": GROUND | {"specdec", "pair"}}
PROGRAMS = sorted((ROOT / "programs").glob("*.py"))
FOLDERS = ("programs", "exercises", "tests", "docs", "examples")
ALL = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(
    [*ROOT.glob("*.py"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))])}


def imported(tree):
    """The modules that are imported anywhere in it, and their folders."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found | {name.split(".")[0] for name in found}


# ---------------------------------------------------------------- who imports whom

@pytest.mark.parametrize("name", BELOW)
def test_a_file_imports_from_the_floors_below_alone(name):
    """But `main` of specdec.py and of train_tiny.py. So the core can be lifted out."""
    assert {path.stem for path in ROOT.glob("*.py")} == BELOW.keys()
    tree = ALL[ROOT / f"{name}.py"]
    inside = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)
              and imported(one)}
    assert inside == ({"main"} if name in ("specdec", "train_tiny") else set())
    top = set().union(*(imported(one) for one in tree.body if getattr(one, "name", "") != "main"))
    assert top & {*BELOW, *FOLDERS} <= BELOW[name], "it imports from above"


def test_no_modules_import_each_other_in_a_circle():
    """The floors have none; the programs may use each other, and those of the top use all."""
    left = {f"programs.{path.stem}": imported(ALL[path]) for path in PROGRAMS}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left, f"these import each other: {sorted(left)}"
    assert {path.stem for path in ROOT.glob("*.py")} == BELOW.keys()


def test_only_five_packages_are_needed():
    """By examples more: a pretrained model needs them."""
    ours = {path.stem for path in ALL} | set(FOLDERS) | sys.stdlib_module_names
    needed = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    packages = {"numpy", "torch", "tiktoken", "pytest", "hypothesis"}
    assert {line.split(">")[0] for line in needed} == packages
    for path, tree in ALL.items():
        others = {name for name in imported(tree) if "." not in name} - ours - packages
        assert not others or path.parent.name == "examples", f"{path.name} imports {others}"


# ---------------------------------------------------------------- how much there is

@pytest.mark.parametrize("most, files", [
    (460, [ROOT / f"{name}.py" for name in ("specdec", "sampling", "model")]),
    (900, [ROOT / f"{name}.py" for name in BELOW if name != "variants"]),
    (750, [*PROGRAMS, ROOT / "variants.py"])], ids=("core", "core and training", "around it"))
def test_there_is_no_more_to_read_than_was_promised(most, files):
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert lines <= most, f"{lines} lines, and {most} are the most"


def test_no_line_is_longer_than_100_columns():
    long = [f"{path.name}:{number}" for path in ALL for number, line in enumerate(
        path.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 100]
    assert not long, f"too long: {', '.join(long)}"
