"""What the benchmark trains: models at the sizes of their papers, synthetic samples, a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...compress.builder.did_you_mean import did_you_mean
from ..workloads.emulation import Trace, emulated
from ..workloads.models import TORCHVISION, VISION, ModelConfig, build_model, gpt, mlp

RESNETS = VISION[:4]
PICTURE_CLASSES, CLASSES = 1000, 10
WORDS, TOKENS = 50257, 128  # GPT-2's vocabulary; tokens a sample
BERT_WORDS = 30522
TINY_LAYERS, TINY_WIDTH = 600, 16
MLP_SHAPE, MLP_WIDTH, MLP_LAYERS = (3, 32, 32), 1024, 4


@dataclass(frozen=True)
class Task:
    """A model to train: `build` makes it on the current default device, `sample` some inputs and targets.

    `loss` takes the model, inputs and targets. `batch_size`: the samples of a step, where that is not the user's choice.
    `fused`: the optimizer goes over the parameters once, as its time on this processor is not what is emulated.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    batch_size: int | None = None
    fused: bool = False


def task_names() -> list[str]:
    """The models that there are, and torchvision:NAME."""
    return [*VISION, *OTHERS]


def task(name: str, image_size: int) -> Task:
    """A model by its name. Raises ValueError for an unknown one."""
    if name in VISION or name.startswith(TORCHVISION):
        return _pictures(name.removeprefix(TORCHVISION), image_size)
    if name in OTHERS:
        return OTHERS[name]
    hint = did_you_mean(name, task_names())
    raise ValueError(f"unknown model {name!r}{hint}; there are: {', '.join(task_names())}, torchvision:NAME")


def emulated_task(trace: Trace, dilate: float) -> Task:
    """The layers of a trace, which take its time: neither inputs nor targets matter."""
    return Task(trace.name, lambda: emulated(trace, dilate), _nothing, _own_loss, trace.batch_size, fused=True)


def _own_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs)
    return loss


def _nothing(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.zeros(count), torch.zeros(count)


def _pictures(name: str, size: int) -> Task:
    def build() -> nn.Module:
        from ..workloads.models.vision import classifier  # here, since torchvision is optional

        return classifier(name, PICTURE_CLASSES)

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return _images(count, (3, size, size), PICTURE_CLASSES, generator)

    return Task(name, build, sample, _class_loss)


def _images(count: int, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.rand(count, *shape, generator=generator), torch.randint(classes, (count,), generator=generator)


def _class_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs), targets)


def _mlp() -> nn.Module:
    return mlp.MLP(MLP_SHAPE, CLASSES, MLP_WIDTH, MLP_LAYERS)


def _mlp_sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _images(count, MLP_SHAPE, CLASSES, generator)


def _tiny() -> nn.Module:
    """Much work a parameter for whoever handles gradients one by one."""
    return nn.Sequential(*(nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(TINY_LAYERS)))


def _tiny_sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return _images(count, (TINY_WIDTH,), TINY_WIDTH, generator)


def _gpt() -> nn.Module:
    """The size of GPT-2's smallest (Radford et al. 2019), with an output layer of its own."""
    return gpt.GPT(vocabulary=WORDS, context=TOKENS, width=768, layers=12, heads=12)


def _resnet18() -> nn.Module:
    return build_model(ModelConfig("resnet18-cifar"))


def _gpt_sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(WORDS, (count, TOKENS + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _bert() -> nn.Module:
    """BERT-base with its masked-language output (Devlin et al. 2019), weights random."""
    from transformers import BertConfig, BertForMaskedLM  # here, since it is optional

    network: nn.Module = BertForMaskedLM(BertConfig(vocab_size=BERT_WORDS))
    return network


def _bert_sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(BERT_WORDS, (2, count, TOKENS), generator=generator)
    return tokens[0], tokens[1]


def _bert_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs, labels=targets).loss
    return loss


OTHERS = {
    "gpt": Task("gpt", _gpt, _gpt_sample, _token_loss),
    "bert": Task("bert", _bert, _bert_sample, _bert_loss),
    "mlp": Task("mlp", _mlp, _mlp_sample, _class_loss),
    "tiny": Task("tiny", _tiny, _tiny_sample, _class_loss),
    "resnet18-cifar": Task("resnet18-cifar", _resnet18, _mlp_sample, _class_loss),
}
