"""``python -m kvkeep``: the command, for launchers that want a module (``accelerate launch -m kvkeep …``)."""

from kvkeep.cli import main

if __name__ == "__main__":
    main()
