"""Reasoning models in bounded memory: a KV cache that keeps what matters."""

from kvkeep.core.budget import Budget
from kvkeep.core.registry import available_policies, register_policy
from kvkeep.engine.attention import prepare, restore
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.trace import Trace
from kvkeep.policies.compose import Composed, policy
from kvkeep.policies.cur import CurDKV
from kvkeep.policies.full import Full
from kvkeep.policies.h2o import H2O
from kvkeep.policies.key_norm import KeyNorm
from kvkeep.policies.keydiff import KeyDiff
from kvkeep.policies.r_kv import RKV
from kvkeep.policies.random_eviction import RandomEviction
from kvkeep.policies.snapkv import SnapKV
from kvkeep.policies.streaming_llm import StreamingLLM
from kvkeep.policies.tova import TOVA
from kvkeep.policies.vase import VaSEAttnV, VaSEDKV

__version__ = "0.1.0.dev0"

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "Budget",
    "Composed",
    "CurDKV",
    "Full",
    "KeyDiff",
    "KeyNorm",
    "RandomEviction",
    "RetentionCache",
    "SnapKV",
    "StreamingLLM",
    "Trace",
    "VaSEAttnV",
    "VaSEDKV",
    "available_policies",
    "policy",
    "prepare",
    "register_policy",
    "restore",
]
