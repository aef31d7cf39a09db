"""Gradients and what is held back of them, flat and by parameter name."""

import torch


def in_memory_order(parameter, grad):
    """A gradient's numbers as they lie, real ones, in a copy."""
    order = sorted(range(parameter.dim()), key=lambda place: -parameter.stride(place))
    grad = grad.to_dense() if grad.is_sparse else grad
    flat = grad.detach().permute(order).reshape(-1)
    return (torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat).clone()


def dense(module):
    """{name: flat gradient or None} of what is trained."""
    return {
        name: None if parameter.grad is None else in_memory_order(parameter, parameter.grad)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def difference(left, right, tolerance=0.0):
    """Gradients that are not the same, None, or as close as this; relative to the largest number. In words."""
    names = [name for name in left if not same(left[name], right[name], tolerance)]
    return ", ".join(f"{name} by {apart(left[name], right[name])}" for name in names)


def apart(left, right):
    if left is None or right is None:
        return "having one"
    return f"{float((left.double() - right.double()).abs().max()):.1g}"


def same(left, right, tolerance):
    if left is None or right is None:
        return left is right
    if not (left.isfinite().all() and right.isfinite().all()):
        return bool((left.isfinite() == right.isfinite()).all())
    return near(left, right, tolerance) if tolerance else torch.equal(left, right)


def near(expected, found, tolerance):
    """Whether numbers are as close as this, relative to the largest one that was expected."""
    if not expected.numel():
        return True
    return float((expected.double() - found.double()).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def held_back(saved):
    """What a rank's state holds back: {parameter: [(first element, numbers)]}; a server's residual counts for all ranks."""
    held = {}
    for name, fields in saved["parameters"].items():
        for key, numbers in fields.items():
            if key == "carried_over" or key.endswith("residual"):
                first = fields.get(f"{key}.first")
                share = saved["world_size"] if first is not None else 1
                held.setdefault(name, []).append((int(first or 0), numbers.double().reshape(-1) * share))
    return held
