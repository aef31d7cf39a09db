"""gradwire on FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

from .attach import attach_sharded
from .handle import ShardHandle
from .sharding import Sharding

__all__ = ["ShardHandle", "Sharding", "attach_sharded"]
