"""Parts of a model that are averaged one after the other, so that the network is used evenly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from ...compress import Layout
from ...compress.protocol.layout import working_dtype
from ..internet.meeting import CPU
from .inside import Inside

Part = Callable[[Tensor], Tensor]
ALL: Part = Inside().part  # where a site has one rank


class Fragment:
    """Some parameters of the model, and on the CPU what all sites had in common of them when they last averaged them.

    `anchor`: that, flat, float32 or wider; `momentum`: the outer optimizer's; `captured`: what the parameters here were when
    their difference was taken, as long as its average is awaited. `frozen`: parameters that may join later; `joined`: the
    names of those that have; `unfrozen`: what the others were when the user unfroze them. `part`: of a parameter, which this
    rank averages; a parameter of which it has nothing is left out.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype,
        frozen: Mapping[str, Tensor] | None = None,
        part: Part = ALL,
    ) -> None:
        self.part, self._dtype = part, dtype
        self.whole = {name: tuple(each.shape) for name, each in parameters.items()}  # shapes, of trained ones
        self.names = (*parameters, *(frozen or {}))
        self.known = (*parameters.values(), *(frozen or {}).values())
        self._trained = self._here(parameters)  # not their memory, which a loop may replace
        self.frozen = self._here(frozen or {})
        self.unfrozen: dict[str, Tensor] = {}
        self.joined: set[str] = set()
        self.layout = self.layout_with(())
        self.anchor = self.now()
        self.momentum = torch.zeros_like(self.anchor)
        self.captured: Tensor | None = None

    def _here(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: each for name, each in parameters.items() if self.part(each).numel()}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that are averaged, in the order of the layout."""
        return {name: self._trained[name] if name in self._trained else self.frozen[name] for name in self.layout.names}

    def layout_with(self, joined: Collection[str]) -> Layout:
        """Return the layout where those of `frozen` whose names are among `joined` are averaged, too."""
        chosen = {**self._trained, **{name: each for name, each in self.frozen.items() if name in joined}}
        shapes = tuple(tuple(self.part(parameter).shape) for parameter in chosen.values())
        wide = any(parameter.dtype.to_real() == torch.float64 for parameter in chosen.values())
        return Layout(tuple(chosen), shapes, torch.float64 if wide else self._dtype, CPU)

    def unnoted(self) -> list[str]:
        """Return the names of parameters that the user has unfrozen, and whose first value is not kept yet."""
        return [
            name
            for name, parameter in self.frozen.items()
            if parameter.requires_grad and name not in self.unfrozen and name not in self.joined
        ]

    def note(self) -> None:
        """Keep what parameters are before their first step of training. Raises ValueError for what no site can take."""
        for name in self.unnoted():
            value = self.value(name)
            if not bool(value.isfinite().all()):
                raise ValueError(
                    f"the parameter {name} was unfrozen and has values that are not finite: give it finite ones before its "
                    "first step, as all sites average it from there"
                )
            self.unfrozen[name] = value

    def value(self, name: str) -> Tensor:
        """Return a copy of what a frozen parameter is now, flat."""
        real = self.part(self.frozen[name])
        return real.to(CPU, working_dtype(real.dtype), copy=True).reshape(-1)

    def join(self, joined: Collection[str], values: Mapping[str, Tensor]) -> None:
        """Average these of `frozen` from now on, and no others of them.

        `values`: the anchors of new ones, flat. An anchor that is not given is zero.
        """
        old, self.layout, self.joined = self.layout, self.layout_with(joined), {*joined} & self.frozen.keys()
        for field in ("anchor", "momentum", "captured"):
            if (flat := getattr(self, field)) is None:
                continue
            known = {name: view.reshape(-1) for name, view in old.views(flat).items()}
            known = known if field == "momentum" else {**values, **known}  # captured at the anchor, training is kept
            setattr(self, field, self._flat(known))
        self.unfrozen = {name: value for name, value in self.unfrozen.items() if name not in self.joined}

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        flat = torch.zeros(self.layout.numel, dtype=self.layout.dtype)
        for name, place in self.layout.views(flat).items():
            if name in values:
                place.view(-1).copy_(values[name])
        return flat

    def now(self) -> Tensor:
        """The parameters as they are here, flat."""
        flat = torch.empty(self.layout.numel, dtype=self.layout.dtype)
        for place, parameter in zip(self.layout.views(flat).values(), self.parameters.values(), strict=True):
            place.copy_(self.part(parameter))
        return flat

    def capture(self) -> Tensor:
        """Capture the parameters, and return the anchor minus them: the movement that training here has made."""
        self.captured = self.now()
        return self.anchor - self.captured

    def follow(self) -> None:
        """Move the parameters to the anchor, and on by what training here has changed since they were captured."""
        assert self.captured is not None
        moved = self.now().sub_(self.captured).add_(self.anchor)  # exactly the anchor where nothing has changed
        self.captured = None
        self._put(moved)

    def reset(self) -> None:
        """Take the anchor for the parameters; what training here has changed is dropped."""
        self.captured = None
        self._put(self.anchor)

    def _put(self, flat: Tensor) -> None:
        for parameter, value in zip(self.parameters.values(), self.layout.views(flat).values(), strict=True):
            self.part(parameter).copy_(value)


def fragments(
    parameters: Mapping[str, Tensor], count: int, frozen: Mapping[str, Tensor] | None = None, part: Part = ALL
) -> list[Fragment]:
    """At most so many, of neighbouring parameters, about equally large. Raises ValueError where there are none.

    `frozen`: parameters that may join later. Each has its place among the fragments now, alike at all sites. `part`: of a
    parameter, which this rank averages; all ranks of a site have the same fragments.
    """
    if not parameters:
        raise ValueError("the model has no parameters that require gradients: there is nothing to average")
    dtypes = {working_dtype(parameter.dtype.to_real()) for parameter in parameters.values()}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    groups = list(grouped(parameters, count).values())
    later = grouped(frozen or {}, len(groups))
    return [Fragment(group, dtype, later.get(index), part) for index, group in enumerate(groups)]


def grouped(parameters: Mapping[str, Tensor], count: int) -> dict[int, dict[str, Tensor]]:
    """Return the parameters by the number of their fragment: at most `count`, about equally large."""
    total = sum(parameter.numel() for parameter in parameters.values())
    ends = accumulate(parameter.numel() for parameter in parameters.values())
    groups: dict[int, dict[str, Tensor]] = {}
    for end, (name, parameter) in zip(ends, parameters.items(), strict=True):
        middle = end - parameter.numel() / 2
        groups.setdefault(min(int(middle * count / max(total, 1)), count - 1), {})[name] = parameter
    return groups
