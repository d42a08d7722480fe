"""`kvkeep policies`, and what the command says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import Result

import kvkeep

Run = Callable[..., Result]


def test_every_policy_has_its_line(run: Run) -> None:
    """A policy that is not listed does not exist for most people."""
    result = run("policies")
    assert result.exit_code == 0, result.stderr
    first_words = {line.split(" ")[0] for line in result.stdout.splitlines()}
    assert set(kvkeep.available_policies()) <= first_words


def test_the_table_says_what_each_needs(run: Run) -> None:
    """Who has no calibration file must see beforehand which policies ask for one."""
    rows = {row["name"]: row for row in json.loads(run("policies", "--json").stdout)}
    assert rows["triattention"]["needs"] == ["rope", "calibration"]
    assert rows["vase-attnv"]["needs"] == ["64 queries"]
    assert (rows["vase-attnv"]["random"], rows["snapkv"]["random"]) == (True, False)
    assert (rows["full"]["trigger"], rows["triattention"]["trigger"]) == ("never", "slack")
    assert (rows["vase-attnv"]["scope"], rows["triattention"]["scope"]) == ("layer", "model")


@pytest.mark.parametrize("name", sorted(kvkeep.available_policies()))
def test_show_prints_source_deviations_and_defaults(run: Run, name: str) -> None:
    """The docstring is the only documentation of a method; a missing section is a missing answer."""
    result = run("policies", "show", name)
    assert result.exit_code == 0, result.stderr
    for section in ("Parameters\n", "Source\n", "Deviations\n", "Defaults\n"):
        assert f"\n{section}-" in result.stdout, section
    assert "buffer = " in result.stdout


def test_shown_defaults_are_those_of_the_policy(run: Run) -> None:
    """Copying them into a paper must give the numbers that ran."""
    facts = json.loads(run("policies", "show", "vase-attnv", "--json").stdout)
    shown = facts["defaults"] | {"budget": 1024}
    assert kvkeep.VaSEAttnV(**shown) == kvkeep.VaSEAttnV(budget=1024)
    assert facts["defaults"]["budget"] == "required"


def test_help_does_not_wait_for_torch() -> None:
    """Help that takes ten seconds is not read."""
    code = (
        "import sys; from kvkeep.cli import main; sys.argv = ['kvkeep', 'generate', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: sys.exit(end.code or ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--keep-ratio" in done.stdout


@pytest.mark.parametrize("command", ["generate", "policies", "plan", "demo", "bench"])
def test_every_command_has_help(run: Run, command: str) -> None:
    """A command that is not wired up, or whose help fails, is found here."""
    result = run(command, "--help")
    assert result.exit_code == 0
    assert command in result.stdout


def test_the_version_is_the_packages(run: Run) -> None:
    """Bug reports start with it."""
    assert run("--version").stdout == f"kvkeep {kvkeep.__version__}\n"


def test_no_command_shows_the_help(run: Run) -> None:
    """The first thing anybody types."""
    result = run()
    assert "generate" in result.output
    assert "Traceback" not in result.output
