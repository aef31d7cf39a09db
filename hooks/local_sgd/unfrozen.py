"""Parameters that the user unfreezes in mid-training: sites agree which of them are averaged, and from where."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ...ddp_core.transport.rank_messages import checksum
from ..internet.meeting import Meeting
from .fragment import Fragment

logger = logging.getLogger(__name__)
FAR = 1000.0  # times the largest number of the model, or 1, that a parameter which joins may have
FROZEN, UNFROZEN, JOINED = range(3)  # what a site reports of each parameter that was frozen at the start
SHOWN = 5  # names in a message


def flags(fragments: Sequence[Fragment], unfrozen: Mapping[str, Tensor]) -> list[int]:
    """Return what this site reports of each parameter that was frozen at the start."""
    return [
        JOINED if name in part.joined else UNFROZEN if name in unfrozen else FROZEN
        for part in fragments
        for name in part.frozen
    ]


def joined(fragments: Sequence[Fragment], reported: Sequence[int]) -> set[str]:
    """Return the names of the parameters that a site averages which has reported these flags."""
    names = [name for part in fragments for name in part.frozen]
    return {name for name, flag in zip(names, reported, strict=True) if flag == JOINED}


def anchors(
    meeting: Meeting,
    fragments: Sequence[Fragment],
    reported: Mapping[int, Sequence[int]],
    unfrozen: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the anchors of the parameters that join, flat: the same numbers at all sites.

    `reported`: the flags by site, without sites that are behind. Any site's wish is enough. Most often all sites have the
    same frozen values. Otherwise the first site that unfroze a parameter sends its value.
    """
    homes = {name: part for part in fragments for name in part.frozen}
    sources: dict[str, int] = {}
    for site, site_flags in sorted(reported.items(), reverse=True):
        sources |= {name: site for name, flag in zip(homes, site_flags, strict=True) if flag == UNFROZEN}
    values = {name: unfrozen[name].clone() if name in unfrozen else homes[name].value(name) for name in sorted(sources)}
    if not values:
        return {}
    here = int(checksum(list(values.values())), 16)
    if any(there != [here] for there in meeting.tell([here])):
        for source in sorted(set(sources.values())):
            meeting.copy_from(source, [value for name, value in values.items() if sources[name] == source])
    most = FAR * max([1.0, *(float(part.anchor.abs().max()) for part in fragments if part.anchor.numel())])
    bad = [name for name, value in values.items() if not bool((value.abs() <= most).all())]
    for name in bad:
        logger.warning(
            "the parameter %s, which %s has unfrozen, stays frozen: its value there is not finite, or above %.3g",
            name,
            meeting.names[sources[name]],
            most,
        )
    return {name: value for name, value in values.items() if name not in bad}


def strays(module: nn.Module, fragments: Sequence[Fragment]) -> list[str]:
    """Return the names of parameters that train and are in no fragment: they were added or replaced later."""
    known = {id(each) for part in fragments for each in part.known}
    return [name for name, each in module.named_parameters() if each.requires_grad and id(each) not in known]


def stray_message(names: Sequence[str]) -> str:
    """Return what to tell the user of these parameters."""
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return (
        f"parameters {shown} were added to the model or replaced after LocalSteps was created: they are not averaged, and "
        "each site trains them by itself. Call finish(), and create LocalSteps anew at all sites after such a change"
    )
