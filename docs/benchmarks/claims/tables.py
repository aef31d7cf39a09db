"""The generated tables of the pages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from claims.claim import MEASURED, Claim
from claims.losses import ADAMW, MUON, SGD
from claims.settings import MEMORY, sharded, state

ONE_ANSWER = ("bf16", "int8", "int4")  # from first to last
LOW_RANK, LARGE_LOW_RANK = "powersgd:rank=8,payload=int8", "powersgd:rank=32,payload=int4"


@dataclass(frozen=True)
class Situation:
    """A row of the tables of networks: what to try first, what next, and the claims of their speed-ups over bf16."""

    network: str
    hosts: str
    machine: str
    first: str
    first_claim: str
    following: str
    following_claim: str
    kind: str


SITUATIONS = (
    Situation(
        "100 Mbit/s Ethernet",
        "4 x 1",
        "GPT 19 M, two CPU cores",
        "int8",
        "time int8 100mbit",
        "int4",
        "time int4 100mbit",
        MEASURED,
    ),
    Situation(
        "1 Gbit/s Ethernet",
        "4 x 1",
        "GPT 19 M, two CPU cores",
        "int8",
        "time int8 1gbit",
        "int4",
        "time int4 1gbit",
        MEASURED,
    ),
)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def speed_of(name: str, claims: Mapping[str, Claim]) -> str:
    """Return the speed-up of a claim; what no finished run measured says so."""
    return claims[name].text if name in claims else "not measured"


def networks(claims: Mapping[str, Claim]) -> str:
    """Return README's table of networks."""
    heads = ("your network", "try first", "over `bf16`", "next step", "over `bf16`", "source")
    return table(
        heads,
        (
            (
                each.network,
                f"`{each.first}`",
                speed_of(each.first_claim, claims),
                f"`{each.following}`",
                speed_of(each.following_claim, claims),
                each.kind,
            )
            for each in SITUATIONS
        ),
    )


def machines(claims: Mapping[str, Claim]) -> str:
    """Return the table of networks of docs/choosing.md, with model, GPU and hosts."""
    heads = ("your network", "hosts x GPUs", "model and GPU", "try first", "over `bf16`", "next step", "over `bf16`", "source")
    rows = []
    for each in SITUATIONS:
        first, following = (speed_of(name, claims) for name in (each.first_claim, each.following_claim))
        place = (each.network, each.hosts, each.machine)
        rows.append((*place, f"`{each.first}`", first, f"`{each.following}`", following, each.kind))
    return table(heads, rows)


def evidence(claim: Claim) -> str:
    """Return a loss with the size of its model, its steps and its seeds."""
    seeds = f"{len(claim.values)} seed{'s' * (len(claim.values) > 1)}"
    return f"{claim.text}; {claim.source.model}, {claim.source.steps} steps, {seeds}"


def losses(claims: Mapping[str, Claim], optimizers: Sequence[str]) -> str:
    """Return the table of losses: a column per optimizer."""
    rows = []
    for spec in (*ONE_ANSWER, LOW_RANK, LARGE_LOW_RANK):
        found = (claims.get(f"loss {spec} {each}") for each in optimizers)
        cells = (evidence(each) if each else "not run" for each in found)
        rows.append((f"`{spec}`", claims[f"bytes {spec}"].text, *cells))
    return table(("compressor", "fewer bytes", *optimizers), rows)


def of_fsdp(claims: Mapping[str, Claim]) -> str:
    """Return the table of docs/fsdp.md. A gather of weights is sent twice, one of differences once."""
    rows = []
    for gather, reduce in (("bf16",) * 2, ("int8",) * 2, ("int8", "int4"), ("int4",) * 2, ("int2", "int4")):
        differences = gather in ("int4", "int2")
        memory = 4 * differences + 4 * (reduce == "int4")
        found = [claims.get(f"fsdp loss {gather}/{reduce}"), claims.get(f"fsdp {gather}/{reduce}")]
        shown = (each.text if each else "not measured" for each in found)
        rows.append((f"`{gather}`", f"`{reduce}`", f"{sharded(gather, reduce):.2g}", f"{memory} N" if memory else "0", *shown))
    return table(("`gather`", "`reduce`", "bytes", "memory on each rank", "validation loss", "speed-up"), rows)


def of_reports(claims: Mapping[str, Claim]) -> str:
    """Return the table of reports of docs/gpus-without-nvlink.md."""
    box = [claims[name].text for name in ("EgoVerse none", "EgoVerse bf16", "box int8", "box int4")]
    hidden = [claims["LoongForge exposed"].text, "0 ms", "0 ms"]  # half and a quarter of the all-reduce are below backward
    ego = f"1.2 B parameters on 8 A40 (EgoVerse, pull request 667, September 2026); one GPU alone takes {claims['EgoVerse alone'].text}"
    loong = (
        f"an all-reduce in 16 bits of {claims['LoongForge all-reduce'].text} behind a backward pass of "
        f"{claims['LoongForge backward'].text} (LoongForge, pull request 223, September 2026)"
    )
    return table(("report", "without", "16 bits", "`int8`", "`int4`"), ((ego, *box), (loong, "-", *hidden)))


def of_memory() -> str:
    """Return the table of memory of docs/gpus-without-nvlink.md, for 1.2 B parameters."""
    names = {"int4": "`int4` (0 with an Adam as `optimizer=`)", "int4:residual_bits=8": "`int4:residual_bits=8`"}
    rows = [("`bf16`, `int8`", *["0"] * 4)]
    for spec in MEMORY:
        cells = (f"{1.2 * copies * state(spec, ranks):.1f} GB" for ranks in (8, 2) for copies in (1, 2))
        rows.append((names[spec], *cells))
    return table(("compressor", "8 ranks", "8 ranks, `undo=True`", "2 ranks", "2 ranks, `undo=True`"), rows)
