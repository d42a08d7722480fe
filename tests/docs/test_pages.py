"""What the documents say is true: names, paths, commands, code blocks, generated pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvkeep

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")],
)


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of one language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_generated_pages_are_fresh() -> None:
    """A page that lags behind the code sends users to options that do not exist."""
    script = [sys.executable, ROOT / "scripts" / "build_docs.py", "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """A link to a file that moved is a dead end for a newcomer."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_map_names_every_room() -> None:
    """A room that AGENTS.md does not know has no owner sentence."""
    told = set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "AGENTS.md").read_text(), re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "src" / "kvkeep").glob("*/__init__.py")}
    assert told == rooms


def test_named_make_targets_exist() -> None:
    """The first command that a newcomer pastes must exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.M)}
    assert named <= targets


def test_public_names_can_be_imported() -> None:
    """`from kvkeep import *` and the documentation promise the same names."""
    for name in kvkeep.__all__:
        assert getattr(kvkeep, name) is not None
    policies = {policy.__name__ for policy in kvkeep.available_policies().values()}
    assert policies <= set(kvkeep.__all__)


def test_every_policy_is_in_the_readme() -> None:
    """The table is how a user finds out what there is."""
    table = (ROOT / "README.md").read_text()
    for name in kvkeep.available_policies():
        assert f"| `{name}` |" in table


def test_the_example_policy_of_contributing_passes_the_laws() -> None:
    """The recipe for a new policy is tried, not only written."""
    import kvkeep.testing

    example = next(block for block in blocks("CONTRIBUTING.md", "python") if "class ValueNorm" in block)
    module = ModuleType("contributed_policy")
    sys.modules[module.__name__] = module
    try:
        exec(compile(example, "CONTRIBUTING.md", "exec"), module.__dict__)
        for check in kvkeep.testing.checks():
            check(module.ValueNorm)
    finally:
        del sys.modules[module.__name__]


# The README names the argument that every supported release knows; 5.24 announces its new name.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("number", range(len(blocks("README.md", "python"))))
def test_python_of_the_readme_runs(number: int, demo_model: Path) -> None:
    """Code that is pasted from the README must run as it stands, on the model that `make demo` uses."""
    code = blocks("README.md", "python")[number].replace("(MODEL)", f"({str(demo_model)!r})")
    exec(compile(code, "README.md", "exec"), {"kvkeep": kvkeep})
