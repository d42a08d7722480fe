"""One side of compare_kvpress.py: waits for an arm's name on stdin, decodes a block, answers in JSON.

Runs in either environment: ``--side kvkeep`` (stock transformers and kvkeep) or ``--side kvpress``
(stock transformers of the release that kvpress needs, and kvpress).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

FULL_STEPS = 8


def main() -> None:
    """Load the model once, then serve blocks until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=("kvkeep", "kvpress"), required=True)
    parser.add_argument("--model", required=True)
    for name in ("context", "budget", "buffer", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--policies", default="")
    args = parser.parse_args()
    # Libraries print; the protocol needs a stream of its own.
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    arms, hello = (kvkeep_arms if args.side == "kvkeep" else kvpress_arms)(model, args)

    def answer(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    answer({"arms": list(arms), **hello})
    for line in sys.stdin:
        try:
            answer(arms[json.loads(line)["arm"]]())
        except Exception as error:
            answer({"failure": f"{type(error).__name__}: {error}"})


# -- ours -------------------------------------------------------------------------------------------


def kvkeep_arms(model: Any, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stock caches of the current transformers, and our policies."""
    import kvkeep
    from kvkeep.benchmarking.decode import DecodeSettings, build_arms
    from kvkeep.benchmarking.report import describe_machine

    settings = DecodeSettings(
        batch=args.batch,
        context=args.context,
        steps=args.buffer,
        full_steps=FULL_STEPS,
        stock=("static",),
    )
    policies = [
        kvkeep.policy(name, budget=args.budget, buffer=args.buffer) for name in args.policies.split(",")
    ]
    arms, skipped = build_arms(model, policies, settings)
    if skipped:
        raise SystemExit(f"cannot run: {skipped}")

    def block(arm: Any) -> dict[str, Any]:
        arm.begin()
        begin = time.perf_counter()
        for _ in range(arm.steps):
            arm.step()
        seconds = time.perf_counter() - begin
        arm.end()
        layer = arm.cache.managed_layers[0] if arm.kind == "policy" else None
        entries = args.context + arm.steps if layer is None else max(layer.stored.lens)
        arm.release()
        return {
            "seconds": seconds,
            "steps": arm.steps,
            "entries": entries,
            "cache_bytes": arm.cache_bytes,
        }

    hello = {"stack": f"transformers {transformers.__version__}", "machine": describe_machine(model)}
    named = {arm.name if arm.kind == "stock" else f"kvkeep {arm.name}": arm for arm in arms}
    return {name: lambda arm=arm: block(arm) for name, arm in named.items()}, hello


# -- kvpress ----------------------------------------------------------------------------------------


def kvpress_arms(model: Any, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The stock cache of the release that kvpress needs, and its decoding presses."""
    import kvpress

    scales = channel_scales(model, args.batch)

    def press(base: Any, interval: int) -> Any:
        return kvpress.DecodingPress(base, compression_interval=interval, target_size=args.budget)

    twice = 2 * args.buffer
    arms = {
        "DynamicCache (old transformers)": StockBlock(model, args, scales),
        f"kvpress DecodingPress(KnormPress, {args.buffer})": PressBlock(
            model, args, scales, lambda: press(kvpress.KnormPress(), args.buffer), args.buffer
        ),
        f"kvpress DecodingPress(SnapKVPress, {args.buffer})": PressBlock(
            model, args, scales, lambda: press(kvpress.SnapKVPress(), args.buffer), args.buffer
        ),
        f"kvpress DecodingPress(SnapKVPress, {twice})": PressBlock(
            model, args, scales, lambda: press(kvpress.SnapKVPress(), twice), twice
        ),
    }
    return arms, {"stack": f"transformers {transformers.__version__}", "machine": {}}


@torch.no_grad()
def channel_scales(model: Any, batch: int) -> list[list[torch.Tensor]]:
    """Mean and deviation per channel of the keys and values of a short real prompt, layer by layer."""
    generator = torch.Generator().manual_seed(0)
    cache = DynamicCache(config=model.config)
    prompt = torch.randint(model.config.vocab_size, (batch, 64), generator=generator)
    model(input_ids=prompt, past_key_values=cache)
    return [
        [
            moment
            for tensor in (layer.keys, layer.values)
            for moment in (tensor.mean((0, 2), keepdim=True), tensor.std((0, 2), keepdim=True))
        ]
        for layer in cache.layers
    ]


def synthetic_cache(model: Any, args: argparse.Namespace, scales: list[list[torch.Tensor]]) -> DynamicCache:
    """A stock cache of ``context`` synthetic entries."""
    cache = DynamicCache(config=model.config)
    for index, (key_mean, key_std, value_mean, value_std) in enumerate(scales):
        shape = (1, key_mean.shape[1], args.context, key_mean.shape[3])
        keys = torch.randn(shape) * key_std + key_mean
        values = torch.randn(shape) * value_std + value_mean
        cache.update(keys.expand(args.batch, -1, -1, -1), values.expand(args.batch, -1, -1, -1), index)
    return cache


class StockBlock:
    """Decodes on a fresh full cache."""

    def __init__(self, model: Any, args: argparse.Namespace, scales: list[list[torch.Tensor]]) -> None:
        self.model, self.args, self.scales = model, args, scales
        self.position = args.context
        self.token = torch.zeros(args.batch, 1, dtype=torch.long)

    @torch.no_grad()
    def steps(self, cache: DynamicCache, count: int) -> float:
        """Seconds of ``count`` decode steps at the logical positions."""
        begin = time.perf_counter()
        for _ in range(count):
            positions = torch.full((1, 1), self.position)
            output = self.model(input_ids=self.token, past_key_values=cache, position_ids=positions)
            self.token = output.logits[:, -1:].argmax(-1)
            self.position += 1
        return time.perf_counter() - begin

    def __call__(self) -> dict[str, Any]:
        """One block."""
        self.position = self.args.context
        cache = synthetic_cache(self.model, self.args, self.scales)
        return measured(self.steps(cache, FULL_STEPS), FULL_STEPS, cache)


class PressBlock(StockBlock):
    """Decodes whole compression intervals under a press.

    The first interval, which brings the synthetic context down to the budget, is not timed.
    """

    def __init__(
        self,
        model: Any,
        args: argparse.Namespace,
        scales: list[list[torch.Tensor]],
        press: Any,
        interval: int,
    ) -> None:
        super().__init__(model, args, scales)
        self.press, self.interval = press(), interval
        self.cache: DynamicCache | None = None

    def __call__(self) -> dict[str, Any]:
        """One block: one interval, its compression included."""
        if self.cache is None:
            cache = synthetic_cache(self.model, self.args, self.scales)
            with self.press(self.model):
                self.steps(cache, self.interval)
            self.cache = cache
        with self.press(self.model):
            seconds = self.steps(self.cache, self.interval)
        return measured(seconds, self.interval, self.cache)


def measured(seconds: float, steps: int, cache: DynamicCache) -> dict[str, Any]:
    """The answer to one request."""
    return {
        "seconds": seconds,
        "steps": steps,
        "entries": cache.layers[0].keys.shape[2],
        "cache_bytes": sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values)),
    }


if __name__ == "__main__":
    main()
