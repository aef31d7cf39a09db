"""Gradients that are not averaged: of parameters that changed after the wrap, and of training around the wrapper."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from . import error_messages
from .autograd import gradient_node, outside_transforms, weak_call

INTERVAL = 64  # synchronized forwards between two looks
TIMES = 2  # updates of a parameter by gradients that nobody averages, until that is no accident
living: WeakSet[Any] = WeakSet()  # the reducers of this process


class Strays:
    """The parameters of a model whose gradients reach no bucket.

    `averaged`: {name: parameter} of those that do, with the `nodes` that accumulate their gradients. `module`: their model.
    `remedy`: for messages.
    A parameter is reported when it gets a gradient: an added one by a warning, one that was averaged before by RuntimeError.
    """

    def __init__(self, averaged: Mapping[str, Tensor], nodes: Sequence[Any], module: nn.Module, remedy: str) -> None:
        self._names, self._remedy = set(averaged), remedy
        self._nodes = {id(parameter): node for parameter, node in zip(averaged.values(), nodes, strict=True)}
        self._kept = list(averaged.values())  # so that no other one gets their identities
        self._frozen = [each for each in module.parameters() if not each.requires_grad]
        self._watched: list[weakref.ref[Tensor]] = []
        self._forwards = 0
        self.due = False  # something has happened that may replace parameters
        self.found: dict[str, Tensor] = {}  # at the last look, but for those that were told of
        self._warned: set[str] = set()

    def check(self, trained: Callable[[], Mapping[str, Tensor]]) -> None:
        """Look for strays at the first two synchronized forwards, once a parameter was unfrozen, and now and then.

        `trained`: what trains now, by name.
        """
        self._forwards += 1
        if any(each.requires_grad for each in self._frozen):
            self._frozen, self.due = [each for each in self._frozen if not each.requires_grad], True
        if self.due or self._forwards <= 2 or self._forwards % INTERVAL == 0:
            self.search(trained())

    @outside_transforms
    def search(self, trained: Mapping[str, Tensor]) -> None:
        """Find the strays among the parameters that train now, and watch them."""
        self.due = False
        self.found = {
            name: each
            for name, each in trained.items()
            if isinstance(each, nn.Parameter)  # not what functional_call puts in for a while
            and name not in self._warned
            and self._nodes.get(id(each)) is not gradient_node(each)
        }
        watched = {id(each()) for each in self._watched}
        for parameter in self.found.values():
            if id(parameter) not in watched:
                parameter.register_post_accumulate_grad_hook(weak_call(self.report))
                self._watched.append(weakref.ref(parameter))

    def refuse_replaced(self) -> None:
        """Raise RuntimeError where parameters that were averaged before are among those found."""
        if names := [name for name in self.found if name in self._names]:
            raise RuntimeError(error_messages.replaced(names, self._remedy))

    def report(self, parameter: Tensor) -> None:
        """A stray got a gradient."""
        names = [name for name, each in self.found.items() if each is parameter]
        if self._names.intersection(names):
            self.refuse_replaced()
        if names:
            added = [name for name in self.found if name not in self._names]
            self._warned.update(added)
            self.found = {name: each for name, each in self.found.items() if name in self._names}
            warnings.warn(error_messages.added(added, self._remedy), stacklevel=2)


class SharedParameters:
    """The parameters of a reducer that another one averages, too, where gradients of either are views of its buckets.

    `places`: by index here, these reducers and their indices.
    """

    def __init__(self) -> None:
        self.places: dict[int, list[tuple[weakref.ref[Any], int]]] = {}
        self._living = frozenset[int]()  # the reducers at the last look

    def look(self, mine: Any) -> None:
        """Find them if reducers have come or gone. `mine`: a `Reducer`, whose file imports this one."""
        if (now := frozenset(map(id, living))) == self._living:
            return
        self._living, self.places = now, {}
        indices = {id(parameter): index for index, parameter in enumerate(mine.parameters)}
        for other in living:
            if other is mine or not (mine.assignment.alias or other.assignment.alias):
                continue
            for place, parameter in enumerate(other.parameters):
                if (index := indices.get(id(parameter))) is not None:
                    self.places.setdefault(index, []).append((weakref.ref(other), place))

    def came_elsewhere(self, index: int) -> bool:
        """Return True if another reducer has got the gradient of a parameter in a backward that has not ended."""
        for other, place in self.places.get(index, ()):
            backward = getattr(other(), "_backward", None)
            if backward is not None and place in backward.order:
                return True
        return False


class OutsideGradients:
    """Warns, once each, of gradients that come after the averages of their step, and of training around the wrapper."""

    def __init__(self) -> None:
        self.late = False  # the averages are there, and no forward has ended since
        self._before_forward = True  # the first one of the wrapper
        self._index: int | None = None  # of the parameter that got the first gradient
        self._version = self._updates = 0
        self._warned: set[str] = set()

    def forward_ends(self) -> None:
        """Expect gradients of a forward of the wrapper."""
        self.late = self._before_forward = False

    def note(self, index: int, reducer: Any) -> None:
        """Note a gradient outside of a synchronized backward. `reducer`: a `Reducer`, whose file imports this one."""
        parameter = reducer.parameters[index]
        if self.late:
            reason, text = "late", error_messages.late(reducer.names[index])
        elif self._before_forward and self._trains(index, parameter) and reducer.transport.ranks.world_size > 1:
            reason, text = "bypassed", error_messages.BYPASSED
        else:
            return
        if reason not in self._warned:
            self._warned.add(reason)
            if not shared(parameter, reducer):
                warnings.warn(text, stacklevel=3)

    def _trains(self, index: int, parameter: Tensor) -> bool:
        """Return True once the first parameter has got a gradient again after `TIMES` updates."""
        if self._index is None:
            self._index, self._version = index, parameter._version
        if index != self._index or parameter._version == self._version:
            return False
        self._version = parameter._version
        self._updates += 1
        return self._updates == TIMES


def shared(parameter: Tensor, mine: object) -> bool:
    """Return True if another wrapper averages the parameter, too. It looks at all objects: ask once."""
    if any(_among(parameter, each.parameters) for each in living if each is not mine):
        return True
    torch_s = (each for each in gc.get_objects() if type(each) is TorchDDP)  # torch keeps no list of them
    return any(_among(parameter, getattr(each, "_module_parameters", ())) for each in torch_s)


def _among(parameter: Tensor, others: Iterable[Tensor]) -> bool:
    return any(each is parameter for each in others)
