"""Which content a snapshot has, whoever took it: replicas with the same state serve it under ids of their own."""

from __future__ import annotations

import hashlib
from typing import NewType

import msgspec

from ft_transport.errors import ManifestError
from ft_transport.wire.manifest import Manifest, encode_digests
from ft_transport.wire.tree_codec import encode_tree

ContentId = NewType("ContentId", str)
"""Names a content among all: 32 hexadecimal digits, the same for all who have it."""

_DIGEST_BYTES = 16


def content_id(manifest: Manifest) -> ContentId:
    """The id of what a manifest describes: step, tensors, tree, layouts, chunks and their digests, in this order.

    It's a name, by which receivers find each other, and proves nothing: what comes is compared with the digests of the
    manifest.

    Raises:
        ManifestError: Its digests come later, and have not been asked for.
    """
    if manifest.digests is None:
        raise ManifestError("expected a manifest with digests, they come later", step=manifest.step)
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    parts = (
        str(manifest.step).encode(),
        msgspec.json.encode(manifest.tensors),
        encode_tree(manifest.tree, step=manifest.step).encode(),
        msgspec.json.encode(manifest.meshes),
        msgspec.json.encode(manifest.layouts),
        str(manifest.chunks.chunk_bytes).encode(),
        manifest.digester.name.encode(),
        encode_digests(manifest.digests).encode(),
    )
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return ContentId(hasher.hexdigest())


def parse_content_id(text: str) -> ContentId | None:
    """The id that a path names, or ``None`` if it names none."""
    if len(text) != 2 * _DIGEST_BYTES or not set(text) <= set("0123456789abcdef"):
        return None
    return ContentId(text)
