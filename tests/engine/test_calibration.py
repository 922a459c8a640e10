"""A simulated replica that was calibrated on a real one takes its times.

On an otherwise idle machine single requests are within 15 % (see benchmarks/README.md, and
benchmarks/fidelity.py for the table). Here other work shares the cores, and a real prefill feels
it where a simulated one, which only waits, does not: the bound is wider.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fidelity import calibrated, compare, table
from tests.engine.replica import MODEL, Replica
from tests.engine.simulated import simulated_replica

pytestmark = pytest.mark.engine

LONGEST_TOKENS = 1024
BUDGET_S = 45.0
# Not sizes of the calibration.
SIZES = (300, 700)
MOST_OFF = 0.5


async def test_a_calibrated_replica_is_as_fast_as_the_real_one(
    replica: Replica, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(await calibrated(replica.url, MODEL, LONGEST_TOKENS, BUDGET_S)))
    with simulated_replica(replica.model_folder, calibration=path) as side:
        rows = await compare(replica.url, side.url, MODEL, SIZES)
    assert len(rows) == 3 * len(SIZES)
    print(table(rows))
    assert all(abs(row.error) < MOST_OFF for row in rows), table(rows)
