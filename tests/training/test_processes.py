"""Two processes learn what one would have learned from all their rows."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from kvkeep.testing.models import tiny_model
from kvkeep.training import Document, Documents, Recipe, train, training

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from test_processes import trained
import torch
gates, main = trained(rows=1, folder=sys.argv[3])
if main:
    torch.save(gates, sys.argv[1])
"""


def source(number: int) -> Document:
    """Documents of one length: then the mean over processes is the mean over tokens."""
    generator = torch.Generator().manual_seed(number)
    return Document(torch.randint(0, 60, (24,), generator=generator).tolist())


def trained(rows: int, folder: str) -> tuple[dict[str, torch.Tensor], bool]:
    """Gates after two steps, and whether this is the main process."""
    recipe = Recipe(
        memory=4, row=24, rows=rows, accumulate=2, steps=2, warmup=1, rate=5e-2, bias=2, width=8, capacity=0
    )
    documents = Documents(source, recipe.row, rows, "even")
    with training(tiny_model("llama"), documents, recipe, "base") as trainer:
        train(trainer, Path(folder))
        return trainer.student.gates.state_dict(), trainer.accelerator.is_main_process


def test_two_processes_are_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT,
                str(tmp_path / "gates.pt"),
                str(Path(__file__).parent),
                str(tmp_path),
            ],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in running:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    together = torch.load(tmp_path / "gates.pt", weights_only=True)
    log = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2]
    alone, _ = trained(rows=2, folder=str(tmp_path / "alone"))
    for name, mine in alone.items():
        torch.testing.assert_close(together[name], mine, rtol=1e-4, atol=1e-6)
