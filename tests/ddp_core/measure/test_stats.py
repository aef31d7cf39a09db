"""What all steps so far have cost, however many there are."""

from gradwire.ddp_core.measure.stats import MANY, Totals
from gradwire.ddp_core.measure.step import BucketStats, Record, Step


def test_what_is_noted_after_it_was_added_counts_too():
    totals, count = Totals(), 2 * MANY + 5
    for _ in range(count):
        program = BucketStats(("weight",), 1, Record())
        totals.count([program])
        program.record.requests.append(("all", 4, 6.0))
    traffic = totals.stats(Step(), 0).total.traffic
    assert (traffic.rounds, traffic.payload_bytes, traffic.sent_bytes) == (count, 4 * count, 6.0 * count)
