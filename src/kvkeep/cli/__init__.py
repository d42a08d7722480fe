"""The kvkeep command: parses, calls, prints."""

from __future__ import annotations


def main() -> None:
    """Run ``kvkeep`` on the arguments of this process."""
    # NOTE: imported here, so that kvkeep.cli.demo_model and its like cost no command line.
    from kvkeep.cli.app import app

    app(prog_name="kvkeep")
