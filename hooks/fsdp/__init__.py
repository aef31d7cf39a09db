"""gradwire on FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

from .attach import attach_sharded
from .handle import ShardHandle
from .modules import is_sharded

__all__ = ["ShardHandle", "attach_sharded", "is_sharded"]
