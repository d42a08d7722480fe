"""The figure of `kvkeep analyze dilution`: mass on the evidence and right reads along the dial."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.evaluation.dilution_summary import Dilution, Mean, Setting
from kvkeep.evaluation.report.svg import Axis, Drawing, ticks

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420.0, 276.0, 52.0, 12.0, 40.0, 226.0

# The page that a report puts around its figures has these colours; this file stands alone.
_STYLE = """<style>
svg { background: #fff; } text { font: 12px system-ui, sans-serif; fill: #1c2024; }
.tick { fill: #60646c; } .grid { stroke: #d9dce1; } polyline { stroke-width: 1.5; }
.full { stroke: #3b6fd4; fill: #3b6fd4; } .evicted, .predicted { stroke: #c2571a; fill: #c2571a; }
.bound { stroke: #60646c; fill: #60646c; stroke-dasharray: 1 3; } .predicted { stroke-dasharray: 4 4; }
polyline { fill: none !important; } text { stroke: none !important; }
@media (prefers-color-scheme: dark) { svg { background: #16181b; } text { fill: #eceef0; }
.tick { fill: #a0a5ad; } .grid { stroke: #3a3f46; } .full { stroke: #7aa5ff; fill: #7aa5ff; }
.evicted, .predicted { stroke: #ff9a5c; fill: #ff9a5c; } }
</style>"""

_LINES = ("full", "evicted", "predicted", "bound")


def dilution_figure(settings: Sequence[Setting], dial: str, policy: str) -> str:
    """Mass on the evidence in the reading head: full cache, under the policy, predicted, and the bound.

    Returns
    -------
    str
        A complete SVG file without scripts; it follows light and dark.
    """
    head = settings[0].heads[0].head
    drawing = Drawing(_WIDTH, _HEIGHT, f"Attention on the evidence, head {head}")
    lines = {name: [_value(setting.heads[0], name) for setting in settings] for name in _LINES}
    shown = [one.value for line in lines.values() for one in line]
    y = Axis(ticks(min(shown), max(shown)), _BOTTOM, _TOP)
    x = Axis(ticks(settings[0].dial, settings[-1].dial), _LEFT, _WIDTH - _RIGHT)
    for value in y.values:
        drawing.line(_LEFT, y.place(value), _WIDTH - _RIGHT, y.place(value), "grid")
        drawing.text(_LEFT - 6, y.place(value) + 4, f"{value:g}", anchor="end", class_="tick")
    for value in x.values:
        drawing.text(x.place(value), _BOTTOM + 18, f"{value:g}", anchor="middle", class_="tick")
    drawing.text(0, 12, f"share of attention on the evidence, head {head}, {policy}")
    drawing.text(_LEFT, _BOTTOM + 38, dial)
    for place, (name, line) in enumerate(lines.items()):
        drawing.text(_LEFT + 92 * place, 28, name, class_=name)
        points = [(x.place(setting.dial), one) for setting, one in zip(settings, line, strict=True)]
        path = " ".join(f"{across:.1f},{y.place(one.value):.1f}" for across, one in points)
        drawing.add("polyline", points=path, class_=name)
        for across, one in points:
            if one.interval is not None:
                low, high = (min(max(each, y.values[0]), y.values[-1]) for each in one.interval)
                drawing.line(across, y.place(low), across, y.place(high), name)
    return (
        drawing.render()
        .replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        .replace(">", f">{_STYLE}", 1)
    )


def _value(head: Dilution, name: str) -> Mean:
    return {
        "full": head.mass_full,
        "evicted": head.mass_evicted,
        "predicted": Mean(value=head.mass_predicted.value, interval=None),
        "bound": Mean(value=head.bound, interval=None),
    }[name]
