"""Weights inside a request: what a server's `/update_weights_from_tensor` unpickles.

The payload is a plain pickle of [(name, CPU tensor)] with the bytes inside. SGLang's restricted unpickler accepts it, it
needs no class of SGLang here, works across hosts, and leaves no process that would hold shared memory, as payloads made
with torch.multiprocessing do. What the unpickler does not accept kills the server, so payloads are made here only.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

Named = tuple[str, Tensor]
_PROTOCOL = 4


def own_copy(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor with a storage of its own: a pickle holds whole storages, and a stream may reuse its buffers."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor.detach())
    return copy


def buckets(stream: Iterable[Named], bucket_bytes: float) -> Iterator[list[Named]]:
    """The stream in lists of at most `bucket_bytes`, in order; a tensor that is larger is a list of its own, none is empty."""
    bucket: list[Named] = []
    held = 0
    for name, tensor in stream:
        if bucket and held + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, own_copy(tensor)))
        held += tensor.nbytes
    if bucket:
        yield bucket


def tensor_payload(bucket: Sequence[Named]) -> bytes:
    """Base64 of the pickle. Tensors must be as `own_copy` makes them."""
    for name, tensor in bucket:
        if type(tensor) is not Tensor or tensor.is_cuda or tensor.untyped_storage().nbytes() != tensor.nbytes:
            raise ValueError(f"{name} is not a CPU tensor with a storage of its own")
    return base64.b64encode(pickle.dumps(list(bucket), protocol=_PROTOCOL))


def tensor_request(payload: bytes, tp: int) -> bytes:
    """The JSON body: each of the server's `tp` ranks reads the payload at its own place in the list."""
    return b'{"flush_cache":true,"serialized_named_tensors":["' + b'","'.join([payload] * tp) + b'"]}'
