"""The laws as a conformance suite that runs on any policy, and tiny models to run it on."""

from kvkeep.testing.conformance import Check, check_policy, checks
from kvkeep.testing.models import FAMILIES, tiny_model
from kvkeep.testing.oracle import oracle_gap

__all__ = ["FAMILIES", "Check", "check_policy", "checks", "oracle_gap", "tiny_model"]
