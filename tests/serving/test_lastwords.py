"""What a worker refuses is repeated by the process that started everything, at its end."""

import subprocess
import sys

PROGRAM = """
import subprocess, sys
from kvkeep.serving import lastwords
lastwords.listen()
lastwords.listen()
worker = '''
from kvkeep.core.errors import UnsupportedError
from kvkeep.serving import lastwords
lastwords.listen()
{after}
with lastwords.left():
    raise UnsupportedError("no", ["this", "that"])
'''
subprocess.run([sys.executable, "-c", worker], check=False)
{later}
raise SystemExit("the server's own last words")
"""


def run(after="", later=""):
    program = PROGRAM.format(after=after, later=later)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return done.stderr


def test_the_reasons_come_last():
    said = run()
    assert said.count("UnsupportedError: no:") == 1  # the worker's own traceback
    assert said.endswith("The engine did not start: no:\n  - this\n  - that\n")


def test_an_engine_that_starts_after_all_takes_them_back():
    assert run(later="lastwords.forget()").endswith("the server's own last words\n")


def test_without_a_refusal_nothing_is_said():
    assert run(after="raise SystemExit").endswith("the server's own last words\n")
