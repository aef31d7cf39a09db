"""A model in gradwire's DistributedDataParallel, or in torch's with compression attached."""

from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire


def wrapped(own, module, spec, of_handle=None, **options):
    """The wrapped model and its handle. `of_handle`: options that torch's class does not know."""
    of_handle = of_handle or {}
    if own:
        model = gradwire.DistributedDataParallel(module, compressor=spec, **of_handle, **options)
        return model, model.compression
    model = TorchDDP(module, **options)
    return model, gradwire.attach(model, spec, **of_handle)
