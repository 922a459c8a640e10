"""Runs a client that is a script of its own and reads what it prints."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

LIMIT_S = 60


def run(command: list[str], on_begun: Callable[[], None] | None = None) -> Any:
    """The last line a client prints, from JSON; `on_begun` is called when it says "begun"."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            if on_begun is not None:
                said = process.stdout.readline()
                if said:
                    assert json.loads(said) == "begun", said
                    on_begun()
            out, err = process.communicate(timeout=LIMIT_S)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])
