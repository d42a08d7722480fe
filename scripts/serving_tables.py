"""The tables of docs/serving.md: settings, policies that vLLM can serve, and what is refused."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig

import kvkeep
from kvkeep.core.errors import KvkeepError
from kvkeep.engine.spec import model_spec
from kvkeep.policies.compose import PARTS
from kvkeep.serving.refusals import TESTED, config_reasons, policy_reasons
from kvkeep.serving.settings import Settings
from kvkeep.testbed.shipped import shipped_model

#: Parts that cannot be written without an option.
NEEDED = {"threshold": "threshold(at=0.001)"}
#: A configuration of vLLM with everything that is refused.
EVERYTHING: Any = SimpleNamespace(
    speculative_config=object(),
    kv_transfer_config=object(),
    cache_config=SimpleNamespace(cache_dtype="fp8"),
    parallel_config=SimpleNamespace(
        decode_context_parallel_size=2,
        prefill_context_parallel_size=2,
        tensor_parallel_size=1,
        use_ubatching=True,
    ),
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    model_config=SimpleNamespace(
        use_mla=True, is_encoder_decoder=True, is_mm_prefix_lm=True, runner_type="pooling"
    ),
)


def settings_table() -> str:
    """One row for each key, from the docstring of :class:`Settings`."""
    doc = inspect.getdoc(Settings) or ""
    told = re.findall(r"^(\w+)\n((?:    .*\n?)+)", doc.partition("----------\n")[2], re.MULTILINE)
    words = {name: " ".join(text.split()).replace("``", "`") for name, text in told}
    rows = ["| key | meaning | default |", "|---|---|---|"]
    for each in fields(Settings):
        default = "" if each.default in (MISSING, None) else f"`{json.dumps(each.default)}`"
        if each.name in ("policy", "budget"):
            default = "must be given"
        rows.append(f"| `{each.name}` | {words[each.name]} | {default} |")
    return "\n".join(rows)


def served_table() -> str:
    """One row for each policy: served, or everything against it."""
    spec = model_spec(AutoConfig.from_pretrained(shipped_model("trace-1")))
    rows = ["| policy | served | if not, why; or what it asks for |", "|---|---|---|"]
    parts = [f"snapkv + {NEEDED.get(part, part)}" for part in PARTS]
    for name in [*kvkeep.available_policies(), *parts]:
        try:
            policy = Settings(policy=name, budget=1024, buffer=128).make_policy()
            reasons = policy_reasons(policy, spec, EVERYTHING, None)
        except KvkeepError as error:
            reasons = [str(error)]
        # What a setting cures is no refusal.
        cured = all("set " in reason or '"calibration"' in reason for reason in reasons)
        said = "; ".join(reason.replace(f"{name} ", "", 1) for reason in reasons)
        rows.append(f"| `{name}` | {'yes' if cured else 'no'} | {said} |")
    return "\n".join(rows)


def refused_list() -> str:
    """One line for each feature of vLLM that is refused."""
    tested = ", ".join(f"{version}.*" for version in TESTED)
    lines = config_reasons(EVERYTHING)
    lines.append(f'a vLLM that is not {tested}: install one of those, or set "allow_untested": true')
    return "\n".join(f"- {line}" for line in lines)


def fill(page: str) -> str:
    """The page with its tables."""
    for name, table in (
        ("settings", settings_table()),
        ("served", served_table()),
        ("refused", refused_list()),
    ):
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        page = f"{before}<!-- {name} -->\n{table}\n<!-- /{name} -->{rest.partition(f'<!-- /{name} -->')[2]}"
    return page
