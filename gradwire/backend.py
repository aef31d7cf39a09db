"""The backend of torch.distributed: `import gradwire.backend`, then `init_process_group("gradwire")`."""

from .ddp_core.transport.direct.torch_backend import register

register()
