"""What a worker refuses is repeated by the process that started everything, at its end."""

import subprocess
import sys

import pytest

from kvkeep.serving import lastwords

PROGRAM = """
import multiprocessing, sys
from kvkeep.core.errors import UnsupportedError
from kvkeep.serving import lastwords

def worker(refuse):
    lastwords.listen()
    if refuse:
        with lastwords.left():
            raise UnsupportedError("no", ["this", "that"])

if __name__ == "__main__":
    lastwords.listen()
    lastwords.listen()
    child = multiprocessing.get_context("{method}").Process(target=worker, args=({refuse},))
    child.start()
    child.join()
    {later}
    sys.exit("the server's own last words")
"""


def run(folder, method="spawn", refuse=True, later="pass"):
    program = folder / "program.py"
    program.write_text(PROGRAM.format(method=method, refuse=refuse, later=later))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    return done.stderr


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_reasons_come_last(tmp_path, method):
    said = run(tmp_path, method)
    assert said.count("UnsupportedError: no:") == 1  # the worker's own traceback
    assert said.endswith("The engine did not start: no:\n  - this\n  - that\n")


def test_an_engine_that_starts_after_all_takes_them_back(tmp_path):
    assert run(tmp_path, later="lastwords.forget()").endswith("the server's own last words\n")


def test_without_a_refusal_nothing_is_said(tmp_path):
    assert run(tmp_path, refuse=False).endswith("the server's own last words\n")


def test_a_program_started_by_another_listens_for_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(lastwords.VARIABLE, str(tmp_path / "kvkeep-1-other.txt"))
    assert "The engine did not start" in run(tmp_path)
