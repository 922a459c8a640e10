"""The doctor: looks for what silently breaks reuse in a fleet, and says how to mend it.

`gather.py` asks and listens, `findings.py` judges what was seen. Whoever has facts can judge them
again without asking anybody.
"""

from router.doctor.facts import ReplicaFacts
from router.doctor.findings import findings
from router.doctor.verdict import Finding, Severity

__all__ = ["Finding", "ReplicaFacts", "Severity", "findings"]
