"""Draw docs/figures/decode.svg from recorded runs of `kvkeep bench decode`.

    python scripts/figures.py benchmarks/results/decode-context-*.json

Each file is one run at one context; the page is plain SVG, so nothing but this script is needed to draw it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "figures" / "decode.svg"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 46, 52
# Arms to draw: name in the file, label, colour.
LINES = (
    ("DynamicCache", "full cache, DynamicCache", "#b4532a"),
    ("StaticCache", "full cache, StaticCache", "#8a6d1d"),
    ("vase-attnv", "kvkeep, vase-attnv at 512", "#1f6f8b"),
)


def read(paths: list[Path]) -> dict[str, list[tuple[int, float]]]:
    """Milliseconds per step by arm and context."""
    points: dict[str, list[tuple[int, float]]] = {}
    for path in paths:
        run = json.loads(path.read_text())
        for arm in run["arms"]:
            points.setdefault(arm["name"], []).append((run["settings"]["context"], arm["step_ms"]["median"]))
    return {name: sorted(line) for name, line in points.items()}


def draw(points: dict[str, list[tuple[int, float]]], caption: str) -> str:
    """The chart as SVG."""
    contexts = sorted({context for line in points.values() for context, _ in line})
    top = max(ms for name, *_ in LINES for _, ms in points.get(name, [])) * 1.08

    def x(context: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * context / contexts[-1]

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ms / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fbfaf7"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#222">'
        "Milliseconds per decode step, batch of 8</text>",
    ]
    step = next(size for size in (50, 100, 200, 250, 500, 1000, 2000) if top / size <= 6)
    for tick in range(0, int(top) + 1, step):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#555">{tick}</text>'
        )
    for context in contexts:
        parts.append(
            f'<text x="{x(context):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#555">'
            f"{context}</text>"
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle" fill="#555">'
        f"tokens seen. {caption}</text>"
    )
    for name, label, colour in LINES:
        line = points.get(name, [])
        if not line:
            continue
        path = " ".join(f"{x(context):.1f},{y(ms):.1f}" for context, ms in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x(c):.1f}" cy="{y(ms):.1f}" r="3.5" fill="{colour}"/>' for c, ms in line]
        last_x, last_y = x(line[-1][0]), y(line[-1][1])
        parts.append(
            f'<text x="{last_x + 10:.1f}" y="{last_y - 2:.1f}" fill="{colour}">{label}</text>'
            f'<text x="{last_x + 10:.1f}" y="{last_y + 14:.1f}" fill="{colour}">{line[-1][1]:.0f} ms</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: list[str]) -> int:
    """Draw the figure; returns the exit code."""
    paths = [Path(argument) for argument in arguments]
    if not paths:
        print(__doc__)
        return 2
    threads = json.loads(paths[0].read_text())["machine"].get("threads")
    caption = f"SmolLM2-135M, float32, {threads} CPU threads" if threads else "SmolLM2-135M, float32, CPU"
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(draw(read(paths), caption))
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
