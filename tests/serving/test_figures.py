"""The closed form of a request's figures against a walk through its tokens."""

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.serving.figures import RequestFigures
from kvkeep.serving.schedule import Schedule


def walk(schedule: Schedule, prompt: int, generated: int) -> RequestFigures:
    """Store token by token; look after each one."""
    kept, first = schedule.kept(prompt), schedule.first(prompt)
    held, peak, evictions, evicted, after = 0, 0, 0, 0, {}
    for position in range(prompt + max(0, generated - 1)):
        if schedule.cuts(position, kept=kept, first=first):
            evictions, evicted, held = evictions + 1, evicted + held - kept, kept
        held += 1
        peak = max(peak, held)
        seen = position + 1
        after[seen] = kept if schedule.cuts(seen, kept=kept, first=first) else held
    steps = [after[seen] for seen in after if seen > prompt]
    mean = sum(steps) / len(steps) if steps else float(after[max(after)])
    return RequestFigures(steps=len(steps), mean=mean, peak=peak, evictions=evictions, evicted=evicted)


@given(
    budget=st.integers(1, 100),
    buffer=st.integers(8, 40),
    block_size=st.sampled_from([1, 4, 8]),
    handling=st.sampled_from(["chunk", "defer", "kept"]),
    prompt=st.integers(1, 300),
    generated=st.integers(0, 200),
)
def test_closed_form_equals_the_walk(budget, buffer, block_size, handling, prompt, generated):
    schedule = Schedule(budget=budget, buffer=buffer, block_size=block_size, prompt=handling)
    assert RequestFigures.of(schedule, prompt=prompt, generated=generated) == walk(
        schedule, prompt, generated
    )


def test_a_short_request_evicts_nothing():
    schedule = Schedule(budget=96, buffer=32, block_size=32)
    figures = RequestFigures.of(schedule, prompt=10, generated=11)
    assert figures == RequestFigures(steps=10, mean=15.5, peak=20, evictions=0, evicted=0)
