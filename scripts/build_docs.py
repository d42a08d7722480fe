"""Write the generated pages: docs/policies.md, docs/cli.md, and tables of README.md and docs/serving.md.

python scripts/build_docs.py           write them
python scripts/build_docs.py --check   exit 1 if a page is not what the code says
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import serving_tables
import typer.main

import kvkeep
from kvkeep.cli.app import app
from kvkeep.core.policy import Policy
from kvkeep.policies.allocated import SHARES
from kvkeep.policies.cadence import Surprise
from kvkeep.policies.merged import CaM, Merge
from kvkeep.policies.rescored import NormWeighted, Recency
from kvkeep.policies.shared_layers import SharedLayers

ROOT = Path(__file__).resolve().parent.parent
_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)
_TABLE = re.compile(r"(<!-- policies -->\n).*?(<!-- /policies -->)", re.DOTALL)


def sections(policy: type[Policy]) -> dict[str, str]:
    """Cut a docstring into its parts: ``""`` is what stands before the first heading."""
    parts = _SECTION.split(inspect.getdoc(policy) or "")
    return {"": parts[0].strip()} | {
        name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def headline(policy: type[Policy]) -> str:
    """The first sentence of a docstring."""
    return sections(policy)[""].split("\n\n")[0].replace("\n", " ")


def reference(policy: type[Policy]) -> str:
    """Where a policy comes from: the first sentence of its source."""
    return re.split(r"[;.](?:\s|$)", sections(policy)["Source"].replace("\n", " "))[0]


def plain(text: str) -> str:
    """Docstring markup to Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda m: f"`{m.group(1).rsplit('.', 1)[-1]}`", text)
    return text.replace("``", "`")


def policy_page() -> str:
    """One section for each policy, from its docstring."""
    lines = [
        "# Policies",
        "",
        "Generated from the docstrings by `make docs`; `kvkeep policies show NAME` prints the same.",
        "",
    ]
    named = {f"## {name}": policy for name, policy in kvkeep.available_policies().items()}
    named |= {
        "## Part: what changes the score: `+ norm-weighted`": NormWeighted,
        "## Part: what changes the score: `+ recency`": Recency,
        "## Parts: how entries are chosen: `+ top-k`, `+ sample`, `+ reserve`": kvkeep.Composed,
        "## Part: which layers share a selection: `+ shared-layers`": SharedLayers,
        "## Parts: how the budget is shared out: " + ", ".join(f"`+ {name}`" for name in SHARES): (
            kvkeep.Allocated
        ),
        "## Part: what becomes of evicted values: `+ merge`": Merge,
        "## Part: what becomes of evicted values: `+ cam`": CaM,
        "## Part: when evictions happen: `+ surprise`": Surprise,
    }
    for heading, policy in named.items():
        parts = sections(policy)
        home = "kvkeep" if hasattr(kvkeep, policy.__name__) else policy.__module__
        lines += [heading, "", f"`{home}.{policy.__name__}`", "", plain(parts[""]), ""]
        lines += ["**Options**", ""]
        for entry in re.split(r"\n(?=\S)", parts.get("Parameters", "")):
            option, _, description = entry.partition("\n")
            lines.append(f"- `{option}`: {plain(' '.join(description.split()))}")
        for title in ("Source", "Deviations", "Notes"):
            if title in parts:
                lines += ["", f"**{title}.** {plain(' '.join(parts[title].split()))}"]
        lines.append("")
    return "\n".join(lines)


def policy_table() -> str:
    """The table of the README."""
    rows = ["| name | what it keeps | from |", "|---|---|---|"]
    for name, policy in kvkeep.available_policies().items():
        rows.append(f"| `{name}` | {plain(headline(policy))} | {plain(reference(policy))} |")
    return "\n".join(rows) + "\n"


def command_page() -> str:
    """The help text of every command."""
    lines = ["# Commands", "", "Generated from the program by `make docs`.", ""]

    def walk(command: Any, path: str) -> None:
        # NOTE: newer releases of typer carry their own copy of click: no isinstance on click's classes.
        context = command.context_class(command, info_name=path, terminal_width=100)
        usage = command.get_usage(context)
        lines.extend([f"## {path}", "", "```", usage, "```", "", plain(command.help or ""), ""])
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        if options:
            lines.extend(["| option | meaning | default |", "|---|---|---|"])
            for option in options:
                names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
                default = option.default if not callable(option.default) else None
                shown = "" if default in (None, False, (), []) else f"`{default}`"
                meaning = " ".join((option.help or "").split()).replace("|", "\\|")
                lines.append(f"| {names} | {meaning} | {shown} |")
            lines.append("")
        if hasattr(command, "commands"):
            for name in sorted(command.commands):
                walk(command.commands[name], f"{path} {name}")

    walk(typer.main.get_command(app), "kvkeep")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Every generated page and what it should hold."""
    readme = (ROOT / "README.md").read_text()
    return {
        ROOT / "docs" / "policies.md": policy_page(),
        ROOT / "docs" / "cli.md": command_page(),
        ROOT / "docs" / "serving.md": serving_tables.fill((ROOT / "docs" / "serving.md").read_text()),
        ROOT / "README.md": _TABLE.sub(lambda m: m.group(1) + policy_table() + m.group(2), readme),
    }


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit code."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is not what the code says: run `make docs`")
        else:
            path.write_text(pages()[path])
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
