"""Reading the question again in the middle of an answer, so that its entries are young once more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Refeeding:
    """When a sequence reads its prompt again.

    The tokens of the prompt go in before the token that was written last, one at a time, as new entries at
    new positions: memory stays inside budget and buffer, they may be evicted like any other entry, and the
    answer goes on from its own last token. They are no part of the answer.

    Parameters
    ----------
    every
        After so many tokens written since the answer began, or since the last reading.
    evictions
        After so many evictions since then.

    Source
    ------
    Ours, for the study of the design space.
    """

    every: int | None = None
    evictions: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("evictions", self.evictions)):
            if value is not None and value < 1:
                raise ConfigError(f"refeed_{name} {value} is below 1: leave it out to read the prompt once.")
        if self.every is not None and self.evictions is not None:
            raise ConfigError("refeed_every and refeed_evictions are two rules: give one of them.")


class Refeeder:
    """What the rows of a batch still have to read; each row by itself.

    Parameters
    ----------
    plan
        When.
    prompts
        Tokens of each row's prompt.
    spare
        Positions that each row can spare beside prompt and longest answer; ``None``: no limit. A reading
        that does not fit them is left out, so that an answer never ends earlier for it.
    """

    def __init__(
        self, plan: Refeeding, prompts: Sequence[Sequence[int]], spare: Sequence[int] | None = None
    ) -> None:
        self._plan, self._prompts = plan, prompts
        self._spare = None if spare is None else list(spare)
        self._queues: list[deque[int]] = [deque() for _ in prompts]
        self._since = [(0, 0)] * len(prompts)  # tokens written and evictions at the last reading's end
        self._ended = [True] * len(prompts)
        self._unsure: list[float | None] = [None] * len(prompts)  # of what waits for a reading to end
        #: Prompt tokens that each row has read again.
        self.read = [0] * len(prompts)
        #: Tokens of the answer that each row had stored when each of its readings began.
        self.begun: list[list[int]] = [[] for _ in prompts]

    def reads(self, row: int) -> bool:
        """Whether the row is reading: what its logits say is not looked at."""
        return bool(self._queues[row])

    def next(self, row: int) -> int:
        """The next token of a row that reads."""
        return self._queues[row].popleft()

    def after(self, row: int, token: int, written: int, evictions: int) -> int:
        """What a row reads after it has written a token: that token, or its prompt first.

        Parameters
        ----------
        written, evictions
            Tokens written, this one among them, and evictions so far.
        """
        if not self._ended[row]:  # the first token after a reading: its evictions do not count
            self._since[row], self._ended[row] = (written - 1, evictions), True
        wrote, evicted = self._since[row]
        plan, prompt = self._plan, self._prompts[row]
        due = (plan.every is not None and written - wrote >= plan.every) or (
            plan.evictions is not None and evictions - evicted >= plan.evictions
        )
        if not due or (self._spare is not None and self._spare[row] < len(prompt)):
            return token
        if self._spare is not None:
            self._spare[row] -= len(prompt)
        self._queues[row].extend([*prompt, token])
        self._ended[row] = False
        self.read[row] += len(prompt)
        self.begun[row].append(written - 1)
        return self.next(row)

    def entropy(self, row: int, told: float) -> float:
        """Entropy that the token was drawn from which goes in now, in nats; asked once a token.

        Nobody draws the tokens of a prompt: 0. The token that was written before a reading goes in behind it,
        with what it was drawn from.

        Parameters
        ----------
        told
            What the row's logits say.
        """
        if self.reads(row):
            if self._unsure[row] is None:
                self._unsure[row] = told
            return 0.0
        waited, self._unsure[row] = self._unsure[row], None
        return told if waited is None else waited
