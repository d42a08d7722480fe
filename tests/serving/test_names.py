"""Who a request is, by its prompt and parameters, and in which row it stands."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.serving.names import FIELD, Rows, name_of, require_name, rows_of


def params(seed: int | None = None, **extra: Any) -> Any:
    return SimpleNamespace(seed=seed, extra_args=extra or None)


def test_a_name_follows_from_prompt_and_seed() -> None:
    """A preempted request would go on with other draws, or two requests would share theirs."""
    names = [
        name_of(params(), [1, 2, 3]),
        name_of(params(), [1, 2, 3, 0]),
        name_of(params(), [3, 2, 1]),
        name_of(params(), None),
        name_of(params(seed=0), [1, 2, 3]),
        name_of(params(seed=1), [1, 2, 3]),
        name_of(params(**{FIELD: 7}), [1, 2, 3]),
    ]
    assert len(set(names)) == len(names)
    assert all(-(2**63) <= name < 2**63 for name in names)
    assert names[0] == name_of(params(), (1, 2, 3))
    assert names[-1] == 7
    assert name_of(params(**{FIELD: 0}), [1]) == 0  # nothing, and not missing


@pytest.mark.parametrize("given", ["7", 7.0, True, 2**63, -(2**63) - 1])
def test_a_name_that_is_none_is_the_clients_mistake(given: Any) -> None:
    """It would end the worker, and with it everybody's requests."""
    with pytest.raises(ValueError, match=FIELD):
        require_name(params(**{FIELD: given}))
    require_name(params(**{FIELD: 2**63 - 1}))
    require_name(params())


def test_rows_follow_the_batch() -> None:
    """A policy would draw for a request what belongs to its neighbour."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm has an environment for it")
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from kvkeep.serving.listening import RequestNames

    listens = RequestNames(SimpleNamespace(), None, False)

    def update(removed: Any = (), added: Any = (), moved: Any = ()) -> None:
        listens.update_state(BatchUpdate(batch_size=9, removed=removed, added=added, moved=moved))

    asked = [(row, params(**{FIELD: 10 + row}), [row], []) for row in range(4)]
    update(added=asked)
    assert listens.rows.names == {0: 10, 1: 11, 2: 12, 3: 13}
    update(removed=[1], moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL)])
    assert listens.rows.names == {0: 10, 1: 13, 2: 12}
    update(moved=[(0, 2, MoveDirectionality.SWAP)])
    assert listens.rows.names == {0: 12, 1: 13, 2: 10}
    update(added=[(0, params(**{FIELD: 5}), [], [])])  # a freed row is given away again
    assert listens.rows.names == {0: 5, 1: 13, 2: 10}
    listens.update_state(None)
    assert listens.rows.names == {0: 5, 1: 13, 2: 10}


def test_each_engine_has_its_own_and_none_outlives_it() -> None:
    """Two engines that take turns in a process would draw for each other's requests."""
    one, other = SimpleNamespace(), SimpleNamespace()
    first, second = Rows(one), Rows(other)
    assert rows_of(one) is first
    assert rows_of(other) is second
    del first
    gc.collect()
    assert rows_of(one) is None
    assert rows_of(other) is second
