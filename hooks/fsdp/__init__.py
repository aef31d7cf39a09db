"""gradwire on FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

from .attach import Sharding, attach_sharded
from .handle import ShardHandle

__all__ = ["ShardHandle", "Sharding", "attach_sharded"]
