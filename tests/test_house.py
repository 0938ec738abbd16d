"""What holds of all files together: who imports whom, where draws come from, how properties are
written."""

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROGRAM = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
TESTS = {path.stem: path for path in sorted(HERE.glob("*.py"))}


def syntax(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(nodes):
    """The modules that these nodes import, by the first part of their names."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


# ---------------------------------------------------------------- who imports whom

@pytest.mark.parametrize("name, allowed", [
    ("sampling", set()), ("model", set()), ("vocabulary", set()), ("pair", {"model", "vocabulary"}),
    ("specdec", {"sampling", "model"})])
def test_the_loop_can_be_lifted_out_with_two_files(name, allowed):
    """specdec.py imports more only inside of what its command line calls."""
    assert imported(syntax(PROGRAM[name]).body) & PROGRAM.keys() == allowed


def test_nothing_imports_bench_or_trace():
    for name, path in PROGRAM.items():
        assert not {"bench", "trace"} & imported(ast.walk(syntax(path))), name


def test_only_five_packages_are_needed():
    """numpy, torch, tiktoken, and for the tests pytest and hypothesis."""
    ours = PROGRAM.keys() | TESTS.keys() | sys.stdlib_module_names
    for path in PROGRAM.values():
        assert imported(ast.walk(syntax(path))) - ours <= {"numpy", "torch", "tiktoken"}, path.name
    needed = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    names = {line.split(">")[0] for line in needed}
    assert names == {"numpy", "torch", "tiktoken", "pytest", "hypothesis"}


def test_no_test_imports_a_test():
    for name, path in TESTS.items():
        modules = imported(ast.walk(syntax(path)))
        assert not any(module.startswith("test_") for module in modules), name


# ---------------------------------------------------------------- draws and properties

DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like",
         "multinomial", "bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_", "random_",
         "shuffle", "choice", "choices"}


def calls(nodes):
    """(name called, the call) for every call by name among these nodes."""
    found = (node for node in nodes if isinstance(node, ast.Call))
    return [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in found]


def test_every_draw_names_its_generator():
    """So nothing depends on a global random state, or changes it."""
    for path in (*TESTS.values(), *PROGRAM.values()):
        for name, call in calls(ast.walk(syntax(path))):
            named = [keyword.arg for keyword in call.keywords]
            assert name not in DRAWS or "generator" in named, (path.name, call.lineno)


def test_no_property_has_a_deadline():
    assert settings().deadline is None
    for path in TESTS.values():
        for _, call in calls(ast.walk(syntax(path))):
            for keyword in call.keywords:
                assert keyword.arg != "deadline" or keyword.value.value is None, path.name


def test_no_property_takes_a_fixture_of_one_call():
    """Hypothesis calls a test many times for one set-up. Arguments may come from @given and from
    parametrize alone."""
    properties = 0
    for name, path in TESTS.items():
        for function in ast.walk(syntax(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            decorators = dict(calls(function.decorator_list))
            if given := decorators.pop("given", None):
                properties += 1
                others = {"settings", "times", "example"}
                marks = [one for one in function.decorator_list
                         if getattr(getattr(one, "func", one), "id", "") not in others | {"given"}]
                drawn = len(given.args) + len(given.keywords)
                assert len(function.args.args) <= drawn + len(marks), (name, function.name)
    assert properties > 20
