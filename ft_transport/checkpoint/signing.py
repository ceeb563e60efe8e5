"""Signatures of checkpoints: with a job token, only checkpoints that were signed with it are loaded.

The signature covers the list of files, which has a digest of every chunk of every other file, the step, and the name of
the job. So files of another checkpoint do not fit, nor does the list of another step. An earlier checkpoint of the same
step and job fits: an attacker with a copy could restore it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ft_transport.checkpoint.hashing import CHECKSUM, SECURE_HASH, HashName
from ft_transport.checkpoint.manifest import (
    CheckpointManifest,
    decode_sealed,
    encode_sealed,
)
from ft_transport.errors import CheckpointUntrustedError
from ft_transport.keys import Keys

_PURPOSE: Final = "checkpoint/list of files"


@dataclass(frozen=True, slots=True)
class Trust:
    """Signs the lists of files, and decides which are trusted.

    Attributes:
        keys: Keys of the job token; ``None`` signs nothing, and trusts every list.
        job: Name of the run that saves the checkpoints.
        accepts_unsigned: Whether unsigned lists are trusted.
    """

    keys: Keys | None
    job: str
    accepts_unsigned: bool

    @property
    def hash_name(self) -> HashName:
        """The hash function that new files have to use."""
        return CHECKSUM if self.keys is None else SECURE_HASH

    def seal(self, body: bytes) -> bytes:
        """Return the content of ``manifest.json``: a list of files, with its signature."""
        return encode_sealed(body, self.keys.sign(_PURPOSE, body) if self.keys is not None else "")

    def open(self, encoded: bytes, *, name: str) -> CheckpointManifest:
        """Return the list of files; the inverse of `seal`.

        Args:
            encoded: Content of the file.
            name: Name of the file.

        Raises:
            CheckpointDamagedError: The content was changed, or has a newer format.
            CheckpointUntrustedError: The list is unsigned, or signed with another key, or for another job.
        """
        manifest, body, signature = decode_sealed(encoded, name=name)
        if self.keys is None:
            return manifest
        if not signature:
            if self.accepts_unsigned:
                return manifest
            raise CheckpointUntrustedError(
                f"expected {name} to be signed with the job token, it has no signature; if it was saved without a "
                "token by a run that you trust, load it with accept_unsigned=True",
                step=manifest.step,
            )
        if not self.keys.verifies(signature, _PURPOSE, body):
            key_id = signature.partition(":")[0][:16]
            known = ", ".join(key.key_id for key in self.keys.current())
            why = "the signature is not of this content" if self.keys.with_id(key_id) else f"the keys here are {known}"
            raise CheckpointUntrustedError(
                f"expected {name} to be signed with the job token, it is signed with key {key_id!r}, and {why}",
                step=manifest.step,
            )
        if manifest.hash != SECURE_HASH:
            raise CheckpointUntrustedError(
                f"expected {name} to have digests that nobody can forge, it has {manifest.hash}", step=manifest.step
            )
        if manifest.job != self.job:
            raise CheckpointUntrustedError(
                f"expected {name} of the job {self.job!r}, it is signed for the job {manifest.job[:80]!r}",
                step=manifest.step,
            )
        return manifest
