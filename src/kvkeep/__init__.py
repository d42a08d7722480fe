"""Reasoning models in bounded memory: a KV cache that keeps what matters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.core.budget import Budget
    from kvkeep.core.precision import Precision
    from kvkeep.core.registry import available_policies, register_policy
    from kvkeep.engine.attention import prepare, restore
    from kvkeep.engine.generation import generate
    from kvkeep.engine.retention_cache import RetentionCache
    from kvkeep.engine.trace import Trace
    from kvkeep.policies.allocated import Allocated
    from kvkeep.policies.compose import policy
    from kvkeep.policies.composed import Composed
    from kvkeep.policies.cur import CurDKV
    from kvkeep.policies.db_trim_kv import DBTrimKV
    from kvkeep.policies.expected_attention import ExpectedAttention
    from kvkeep.policies.full import Full
    from kvkeep.policies.h2o import H2O
    from kvkeep.policies.key_norm import KeyNorm
    from kvkeep.policies.keydiff import KeyDiff
    from kvkeep.policies.lazy_eviction import LazyEviction
    from kvkeep.policies.quest import Quest
    from kvkeep.policies.r_kv import RKV
    from kvkeep.policies.raas import RaaS
    from kvkeep.policies.random_eviction import RandomEviction
    from kvkeep.policies.seer_attention import SeerAttention
    from kvkeep.policies.set_diversity import SetDiversity
    from kvkeep.policies.snapkv import SnapKV
    from kvkeep.policies.streaming_llm import StreamingLLM
    from kvkeep.policies.tova import TOVA
    from kvkeep.policies.triattention import TriAttention
    from kvkeep.policies.trim_kv import TrimKV
    from kvkeep.policies.vase import VaSEAttnV, VaSEDKV

__version__ = "0.1.0.dev0"

# A name is imported when it is first used, so that `import kvkeep` and `kvkeep --help` do not wait
# for torch. A new public name stands in three places: above, here and below (a test compares them).
_HOMES = {
    "Allocated": "kvkeep.policies.allocated",
    "Budget": "kvkeep.core.budget",
    "Composed": "kvkeep.policies.composed",
    "CurDKV": "kvkeep.policies.cur",
    "DBTrimKV": "kvkeep.policies.db_trim_kv",
    "ExpectedAttention": "kvkeep.policies.expected_attention",
    "Full": "kvkeep.policies.full",
    "H2O": "kvkeep.policies.h2o",
    "KeyDiff": "kvkeep.policies.keydiff",
    "KeyNorm": "kvkeep.policies.key_norm",
    "LazyEviction": "kvkeep.policies.lazy_eviction",
    "Quest": "kvkeep.policies.quest",
    "Precision": "kvkeep.core.precision",
    "RaaS": "kvkeep.policies.raas",
    "RKV": "kvkeep.policies.r_kv",
    "RandomEviction": "kvkeep.policies.random_eviction",
    "RetentionCache": "kvkeep.engine.retention_cache",
    "SeerAttention": "kvkeep.policies.seer_attention",
    "SetDiversity": "kvkeep.policies.set_diversity",
    "SnapKV": "kvkeep.policies.snapkv",
    "StreamingLLM": "kvkeep.policies.streaming_llm",
    "TOVA": "kvkeep.policies.tova",
    "Trace": "kvkeep.engine.trace",
    "TriAttention": "kvkeep.policies.triattention",
    "TrimKV": "kvkeep.policies.trim_kv",
    "VaSEAttnV": "kvkeep.policies.vase",
    "VaSEDKV": "kvkeep.policies.vase",
    "available_policies": "kvkeep.core.registry",
    "generate": "kvkeep.engine.generation",
    "policy": "kvkeep.policies.compose",
    "prepare": "kvkeep.engine.attention",
    "register_policy": "kvkeep.core.registry",
    "restore": "kvkeep.engine.attention",
}

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "Allocated",
    "Budget",
    "Composed",
    "CurDKV",
    "DBTrimKV",
    "ExpectedAttention",
    "Full",
    "KeyDiff",
    "KeyNorm",
    "LazyEviction",
    "Precision",
    "Quest",
    "RaaS",
    "RandomEviction",
    "RetentionCache",
    "SeerAttention",
    "SetDiversity",
    "SnapKV",
    "StreamingLLM",
    "Trace",
    "TriAttention",
    "TrimKV",
    "VaSEAttnV",
    "VaSEDKV",
    "available_policies",
    "generate",
    "policy",
    "prepare",
    "register_policy",
    "restore",
]


# Rooms that are called by name, as in kvkeep.calibration.load(path).
_ROOMS = ("calibration", "gates")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"kvkeep.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
