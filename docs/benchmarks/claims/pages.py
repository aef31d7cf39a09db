"""What the pages claim: their sentences with figures, and their tables."""

from collections.abc import Mapping
from itertools import chain

from claims import losses, settings, speeds, tables
from claims.claim import Claim
from claims.render import Page

MEMORY = (
    "PowerSGD keeps {memory powersgd:rank=4} per parameter on each rank. `int4` keeps nothing with AdamW alone, and {memory int4} with Muon or SGD."
)
H100 = (
    "On one H100 without communication, a step of a GPT with {h100 parameters} parameters takes {h100 gradwire:bf16@25} the time of torch's DDP with "
    "gradwire's own DDP and `bf16`, and {h100 gradwire:powersgd:rank=4@25} with `powersgd:rank=4`. torch's hooks take {h100 torch:bf16@25} (`bf16`) and "
    "{h100 torch:powersgd@25} (PowerSGD, rank 1)"
)
WARM, RANK_64 = "int4:start_iter=500,warmup=int8", "powersgd:rank=64,payload=int4,start_iter=500,warmup=int8"


def all_claims() -> dict[str, Claim]:
    """Return all claims by name."""
    found = [*losses.claims(), *speeds.claims(), *settings.claims()]
    claims = {each.name: each for each in found}
    if len(claims) != len(found):
        raise ValueError("two claims have one name")
    return claims


def all_pages(claims: Mapping[str, Claim]) -> dict[str, Page]:
    """Return the sentences and tables of each page."""
    return {
        "README.md": Page(
            [
                "which is that of `bf16` at its end and {within} more",
                "Two trainings with `none` and one seed differ by {noise 128 M} at 128 M parameters",
                "and ± its {confidence} interval over seeds",
                MEMORY,
            ],
            [tables.networks(claims), tables.losses(claims, [losses.ADAMW])],
        ),
        "docs/choosing.md": Page(
            [
                "with the {confidence} interval over seeds, or each seed's figure",
                "At 128 M parameters two trainings with `none` differed by {noise 128 M} on one seed",
                "`int4` with error feedback ended at {loss int4 feedback 128 M} there, and from the first step at {loss int4 first step 128 M} after 400 steps",
                "was at {rank 32 bare 100}, {rank 32 bare 200}, {rank 32 bare 300} and {rank 32 400} after 100, 200, 300 and 400 steps. It ended "
                "with the loss that `none` had after {rank 32 step} steps",
                "`int8:error_feedback=true` ended at {loss int8 Muon 11 M} at 11 M parameters",
                "the training loss that `bf16` ends with, and {within} more",
                "`int4:residual_bits=8`: {memory int4:residual_bits=8} per parameter, not {memory int4}",
                f"a GPT of 11 M parameters ended at {{loss int4 Muon 11 M}} after 1,400 steps (two seeds). With the first quarter of 2,000 steps in "
                f"8 bits it ended at {{loss {WARM} Muon 11 M}}",
                f"Such a training sends {{bytes {WARM}}} fewer bytes in all",
                f"ended at {{loss {RANK_64} Muon 11 M}} on that GPT (one seed), with {{bytes {RANK_64}}} fewer bytes in all",
            ],
            [tables.losses(claims, losses.OPTIMIZERS), tables.machines(claims)],
        ),
        "docs/should-i-compress.md": Page(["If the difference is below {worthwhile} of the step, do not compress"]),
        "docs/promises.md": Page([H100]),
        "docs/fsdp.md": Page(
            [
                "with three seeds and the {confidence} interval",
                "The step of `none` is {fsdp over torch} faster there than that of torch's FSDP2",
                "A step with `int8` takes {replicate int8} more time under `replicate` than under torch's DDP",
                "torch's own `replicate`, without compression, takes {replicate torch} more than torch's DDP",
            ],
            [tables.of_fsdp(claims)],
        ),
        "docs/gpus-without-nvlink.md": Page(
            [
                "The formula gives {box bf16} for 16 bits in the first row, where the report has {EgoVerse bf16}",
                "`int8` with error feedback took {h200 gradwire:int8@25} more of a step of a GPT with {h100 parameters} parameters, and `int4` without it "
                "{h200 gradwire:int4:error_feedback=false@25}",
                "8-bit floats changed the loss by {float8 all} in the mean, and by {float8 exempt} with exact vectors and embeddings. Without error "
                "feedback it ended {float8 no feedback} higher",
            ],
            [tables.of_reports(claims), tables.of_memory()],
        ),
        "docs/alternatives.md": Page(
            [
                "a step of a model with 19 M parameters takes {hook powersgd:rank=1@25} with `powersgd:rank=1`, and {hook torch:powersgd@4000} with torch's "
                "PowerSGD hook. On one H100 without communication, gradwire's own DDP with `bf16` takes {h100 gradwire:bf16@25} the time of torch's DDP "
                "without compression, and torch's `bf16` hook {h100 torch:bf16@25}",
            ]
        ),
        "docs/local-steps.md": Page(
            [
                "limits the waits of a round, {limit} by default",
                "Start it again within {search}, with the same secret",
                "A new site waits for `start` ({start} by default)",
            ]
        ),
        "docs/local-steps-explained.md": Page(),
        "docs/local-steps-ranks.md": Page(),
    }
