"""Local SGD in place of an average at every step, where the network leaves little time to compute."""

from __future__ import annotations

from ..local_sgd.arguments import site_compressor
from ..local_sgd.plan import FREE, Wan, sites_plan
from .predict import TRAVELS, Measured

COMPRESSOR, SHARE = "int4", 0.95  # as LocalSteps and `gradwire plan --sites` have them by default
MORE_STEPS = 2  # times as many, which make up for the loss with up to FREE steps between averages


def suggested(measured: Measured, step: float) -> list[str]:
    """Return lines that suggest local SGD between hosts of one rank each; none where it would not be faster.

    It counts twice the steps. `step`: seconds of a step with the recommended compressor at every step.
    """
    ranks, seconds = measured.ranks, measured.computation.seconds
    links = [cost.link for (_, _, scope), cost in measured.costs.items() if scope in TRAVELS]
    slowest = max((link.beta for link in links), default=0.0)
    if ranks.per_host > 1 or not slowest or step <= MORE_STEPS * seconds:
        return []
    latency = max(link.alpha for link in links)
    wan = Wan(ranks.world_size, 1 / slowest, 1 / slowest, latency)
    plan = sites_plan(site_compressor(COMPRESSOR), measured.parameters, wan, seconds, SHARE)
    if plan.every > FREE or step <= MORE_STEPS * seconds / plan.computing:
        return []
    options = f"every={plan.every}, fragments={len(plan.rounds)}, {COMPRESSOR}"
    elements, rate = sum(each.numel() for each in measured.parameters.values()), 8 / slowest / 1e6
    return [
        f"Local SGD (LocalSteps, {options}) would compute for {plan.computing:.0%} of the time here, "
        f"and this compressor for {seconds / step:.0%}. It may need {MORE_STEPS}x as many steps. Plan it by:",
        f"    gradwire plan --sites {ranks.world_size} --parameters {elements} --up {rate:.2f}mbit "
        f"--round-trip-ms {1000 * latency:.1f} --step-seconds {seconds:.3g}",
    ]
