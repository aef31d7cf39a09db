"""The generated tables of the pages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from predicted_steps import Situation

from claims.claim import MEASURED, PREDICTED, Claim
from claims.losses import COLD, ENOUGH, LARGER, NETWORKS
from claims.predicted import name_of, predicted
from claims.settings import sharded
from claims.speeds import smoothed
from gradwire.experiments.advice.rule import Rule

ONE_ANSWER = ("bf16", "int8", "int4")  # from first to last
CORED = "int4:core=4"
LOW_RANK, LARGE_LOW_RANK = "powersgd:rank=8,payload=int8", "powersgd:rank=32,payload=int4"


@dataclass(frozen=True)
class Row:
    """A row of the tables of networks: what to take, the next step, and the claims of their speed-ups over bf16.

    `briefly`: the network as README names it; None if README leaves the row out.
    """

    network: str
    hosts: str
    machine: str
    first: str
    first_claim: str
    following: str
    following_claim: str
    kind: str
    briefly: str | None = None


def of_training(network: str, rate: str) -> Row:
    """Return the row of a rate at which trainings were measured: the least of the ways to smooth losses decides."""
    gains = {spec: min(smoothed(spec, rate)) for spec in ONE_ANSWER[1:]}
    first, following = chosen("", gains.__getitem__)
    claims = f"time {first} {rate}", f"time {following} {rate} smoothings"
    briefly = f"{network}, four hosts" + ", limited by two cores" * (rate == "1gbit")
    return Row(network, "4 x 1", "GPT 19 M, two CPU cores", first, claims[0], following, claims[1], MEASURED, briefly)


def chosen(prefix: str, gain: Callable[[str], float]) -> tuple[str, str]:
    """Return what to take and the next step, by their speed-ups over bf16: the rule of `advise`."""
    one, other = (f"{prefix}{spec}" for spec in ONE_ANSWER[1:])
    worth = Rule().worth({spec: gain(spec) for spec in (one, other)})
    return one if one in worth else f"{prefix}bf16", other if other in worth else "-"


def of_prediction(each: Situation) -> Row:
    """Return the row of a prediction."""
    first, following = chosen(
        "hosts+" if each.gpus_per_host > 1 and each.hosts > 1 else "", lambda it: each.speed_up(it)[0]
    )
    network = "GPUs in one box without NVLink" if each.network is None else f"{each.network:g} Gbit/s Ethernet"
    hosts = f"{each.hosts} x {each.gpus_per_host}"
    places = {
        "2 x 1": f"{network}, two hosts",
        "2 x 8": f"{network}, two hosts of 8 GPUs",
        "1 x 8": f"{network} (8 x A40, a bus of 91 to 108 Gbit/s)",
    }
    claims = name_of(each, first), name_of(each, following)
    kind = PREDICTED if each.network else f"{PREDICTED} from one report"
    machine = f"{each.model}, {each.gpu}"
    return Row(network, hosts, machine, first, claims[0], following, claims[1], kind, places.get(hosts))


@cache
def all_rows() -> tuple[Row, ...]:
    """Return the rows, measured ones first."""
    shown = (each for each in predicted() if each.micro_batches == 1)
    ordered = sorted(shown, key=lambda each: (each.network or 1000, each.hosts, each.gpus_per_host))
    measured = (of_training("100 Mbit/s Ethernet", "100mbit"), of_training("1 Gbit/s Ethernet", "1gbit"))
    return (*measured, *map(of_prediction, ordered))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def cells(row: Row, claims: Mapping[str, Claim]) -> tuple[str, ...]:
    """Return what to take and the next step, each with its speed-up, and the kind of the figures."""
    found = [claims.get(name) for name in (row.first_claim, row.following_claim)]
    base = "hosts+bf16" if row.first.startswith("hosts+") else "bf16"
    over = f" over `{base}`" if base != "bf16" else ""
    gain, more = (each.text + over if each else "not measured" for each in found)
    following = ("-", "-") if row.following == "-" else (f"`{row.following}`", more)
    return (f"`{row.first}`", gain, *following, row.kind)


def networks(claims: Mapping[str, Claim], kind: str) -> str:
    """Return README's table of networks: those that were measured, or those that are predicted.

    Where hosts share their network among GPUs, all columns but "over none" are against hosts+bf16.
    """
    heads = (f"network, {kind}", "take", "over `bf16`", "over `none`", "`int4` over `bf16`")
    rows = []
    for each in all_rows():
        if each.briefly and each.kind.startswith(kind):
            _, gain, _, more, _ = cells(each, claims)
            whole = claims.get(f"{each.first_claim} over none")
            last = each.first.endswith("bf16")
            figures = ("-" if last else gain, whole.text if whole else "-", more)
            rows.append((each.briefly, f"`{each.first}`", *(figure.split(" over ")[0] for figure in figures)))
    return table(heads, rows)


def machines(claims: Mapping[str, Claim]) -> str:
    """Return the table of networks of docs/choosing.md, with model, GPU and hosts."""
    steps = ("take", "over `bf16`", "next step", "over `bf16`")
    heads = ("your network", "hosts x GPUs", "model, GPU", *steps, "source")
    return table(heads, ((each.network, each.hosts, each.machine, *cells(each, claims)) for each in all_rows()))


def evidence(claim: Claim) -> str:
    """Return a loss with the size of its model, its steps and its seeds."""
    seeds = f"{len(claim.values)} seed{'s' * (len(claim.values) > 1)}"
    return f"{claim.text}; {claim.source.model}, {claim.source.steps} steps{claim.source.warm_up}, {seeds}"


def losses(
    claims: Mapping[str, Claim],
    optimizers: Sequence[str],
    specs: Sequence[str] = (*ONE_ANSWER, CORED, LOW_RANK, LARGE_LOW_RANK),
) -> str:
    """Return the table of losses: a column per optimizer."""
    rows = []
    for spec in specs:
        cells = (cell_of_losses(claims, f"loss {spec} {optimizer}") for optimizer in optimizers)
        fewer = claims[f"bytes {spec}"]
        size = f" at {fewer.source.model}" if spec.startswith("powersgd") or spec == CORED else ""
        rows.append((f"`{spec}`", fewer.text + size, *cells))
    return table(("compressor", "fewer bytes than in 32 bits", *(f"loss, {each}" for each in optimizers)), rows)


def cell_of_losses(claims: Mapping[str, Claim], name: str) -> str:
    """Return the losses of a compressor with an optimizer, one after the other."""
    found = []
    for network in ("", *NETWORKS):
        for kind in ("", f"{ENOUGH} seeds", COLD, "longest", LARGER):
            claim = claims.get(", ".join(filter(None, (name, network, kind))))
            found += [f"{network}: " * bool(network) + evidence(claim)] if claim else []
    return "<br>".join(found) or "not run"


def of_fsdp(claims: Mapping[str, Claim]) -> str:
    """Return the table of docs/fsdp.md. A gather of weights is sent twice, one of differences once."""
    rows = []
    for gather, reduce in (("bf16",) * 2, ("int8",) * 2, ("int8", "int4"), ("int4",) * 2, ("int2", "int4")):
        differences = gather in ("int4", "int2")
        memory = "8 N (1 + 2/n)" if differences else "4 N" if reduce == "int4" else "0"
        found = [claims.get(f"fsdp loss {gather}/{reduce}"), claims.get(f"fsdp {gather}/{reduce}")]
        shown = (each.text if each else "not measured" for each in found)
        rows.append((f"`{gather}`", f"`{reduce}`", f"{sharded(gather, reduce):.2f}", memory, *shown))
    return table(("`gather`", "`reduce`", "bytes", "memory on each rank", "validation loss", "speed-up"), rows)


def of_reports(claims: Mapping[str, Claim]) -> str:
    """Return the table of reports of docs/gpus-without-nvlink.md."""
    box = [claims[name].text for name in ("EgoVerse none", "EgoVerse bf16", "box int8", "box int4")]
    hidden = [
        f"{claims['LoongForge exposed'].text} (the difference)",
        "0 ms at best",
        "0 ms at best",
    ]  # half of the all-reduce is shorter than backward
    alone = claims["EgoVerse alone"].text
    ego = f"1.2 B parameters on 8 A40 (EgoVerse, pull request 667, September 2026); one GPU alone takes {alone}"
    loong = (
        f"an all-reduce in 16 bits of {claims['LoongForge all-reduce'].text} behind a backward pass of "
        f"{claims['LoongForge backward'].text} ([LoongForge](https://github.com/baidu-baige/LoongForge/pull/223), 8 GPUs, "
        "pull request 223, September 2026)"
    )
    return table(("report", "without", "16 bits", "`int8`", "`int4`"), ((ego, *box), (loong, "-", *hidden)))
