"""A made-up ship's log of any length with one fact hidden in it: the long prompt of the demo."""

from __future__ import annotations

import random

QUESTION = "What is the password of the powder room?"
FACT = 'The password of the powder room is "marmalade".'
ANSWER = "marmalade"
DAYS, FACT_DAY = 36, 20

_WINDS = (
    "light airs from the north",
    "a fresh wind from the west",
    "a steady breeze from the south-east",
    "squalls out of the north-west",
    "hardly any wind",
    "a gale from the south-west",
    "a fair wind astern",
)
_WORK = (
    "The carpenter mended the pump in the forward hold",
    "Two men painted the rail on the port side",
    "The boatswain had the spare sails dried on deck",
    "We shifted forty barrels to trim the ship by the head",
    "The sailmaker patched the main topsail",
    "All hands scrubbed the lower deck with vinegar",
    "The smith forged new hoops for the water casks",
    "The mate took the boat away and sounded the channel",
    "We bent new ropes to the mizzen",
)
_SIGHTS = (
    "Passed a brig bound for Lisbon, and exchanged numbers with her",
    "Saw a great many flying fish in the forenoon",
    "A whale kept us company for an hour",
    "Raised a low island at dusk and stood off for the night",
    "Nothing in sight all day but water",
    "A heron, far from any land, rested on the bowsprit",
    "Saw the lights of a fishing fleet to leeward",
    "Crossed a line of drifting weed a mile long",
)
_LIFE = (
    "The cook served pease and salt pork",
    "The surgeon reports three men with colds and nobody worse",
    "The boy Thomas learned to splice",
    "In the evening the second mate played the fiddle",
    "The hens laid nine eggs",
    "The ship's cat caught two rats",
    "Issued new blankets to the starboard watch",
    "We found one cask of water spoiled and poured it away",
)


def ship_log(days: int, *, fact_day: int, seed: int = 1) -> str:
    """Write the log of so many days.

    Parameters
    ----------
    days
        Entries to write, about 45 tokens each.
    fact_day
        The day on which :data:`FACT` is noted.
    seed
        Another log for another number.
    """
    draw = random.Random(seed)
    lines = []
    for day in range(1, days + 1):
        sentences = [
            f"Day {day}: {draw.choice(_WINDS)}, {draw.randint(21, 190)} miles made good",
            draw.choice(_WORK),
            draw.choice(_SIGHTS),
            draw.choice(_LIFE),
        ]
        text = ". ".join(sentences) + "."
        lines.append(f"{text} {FACT}" if day == fact_day else text)
    return "\n".join(lines)


def demo_prompt() -> str:
    """The prompt of the demo: about 2,000 tokens in the chat template."""
    return f"Here is the log of the ship Meridian.\n\n{ship_log(DAYS, fact_day=FACT_DAY)}\n\n{QUESTION}"
