"""Reasoning models in bounded memory: a KV cache that keeps what matters."""

from kvkeep.core.budget import Budget
from kvkeep.core.registry import available_policies, register_policy
from kvkeep.engine.attention import prepare, restore
from kvkeep.engine.retention_cache import RetentionCache
from kvkeep.engine.trace import Trace
from kvkeep.policies.compose import Composed, policy
from kvkeep.policies.full import Full
from kvkeep.policies.vase import VaSEAttnV, VaSEDKV

__version__ = "0.1.0.dev0"

__all__ = [
    "Budget",
    "Composed",
    "Full",
    "RetentionCache",
    "Trace",
    "VaSEAttnV",
    "VaSEDKV",
    "available_policies",
    "policy",
    "prepare",
    "register_policy",
    "restore",
]
