"""Request the files of a repository from a hub: the latest commit, and the names, sizes and checksums of its files."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from helexa.neuron.sources.web import Site, WebError

_MAX_LISTING_BYTES = 64 << 20
_HEX40 = re.compile(r"[0-9a-f]{40}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_PLAIN_SEGMENT = re.compile(r"[^\x00-\x1f\\:*?\"<>|]{1,255}")


class _Lfs(msgspec.Struct):
    sha256: str = ""


class _Sibling(msgspec.Struct, rename={"blob_id": "blobId"}):
    rfilename: str
    size: int | None = None
    blob_id: str | None = None
    lfs: _Lfs | None = None


class _Repository(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


@dataclass(frozen=True)
class RemoteFile:
    """A file in a hub's repository, as described by the hub.

    Attributes:
        name: relative path in the repository. It has no parts, such as `..`, that lead out of the download folder.
        size: size in bytes. None if the hub does not state the size.
        sha256: SHA-256 of the content, which hubs state for large files, or None.
        git_id: Git blob id of the content, which hubs state for small files, or None.
        key: name of the cache file for the content. It is the checksum, if the hub states one.
    """

    name: str
    size: int | None
    sha256: str | None
    git_id: str | None
    key: str

    def checksum(self) -> "hashlib._Hash | None":
        """Return a new hash object to compute the checksum of the downloaded content.

        Return None if the hub does not state a checksum. `is_sum` verifies the result.
        """
        if self.sha256:
            return hashlib.sha256()
        if self.git_id and self.size is not None:
            return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        return None

    def is_sum(self, digest: str) -> bool:
        """Return whether the hexadecimal `digest` equals the checksum that the hub states for the file."""
        return digest == (self.sha256 or self.git_id)


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit, by their names."""

    commit: str
    files: Mapping[str, RemoteFile]


def request_listing(site: Site, name: str, timeout: float) -> Listing:
    """Request the latest commit and the file list of repository `name` from the hub at `site`.

    Raises:
        WebError: the hub is unreachable, or it returned an error or an invalid response.
    """
    with site.get(f"/api/models/{name}?blobs=true", timeout=timeout) as response:
        where = response.where
        body = response.text(_MAX_LISTING_BYTES)
    try:
        repository = msgspec.json.decode(body, type=_Repository)
    except msgspec.MsgspecError:
        repository = None
    if repository is None or not _HEX40.fullmatch(repository.sha):
        raise WebError(where, "does not speak the protocol of the Hugging Face Hub", transient=False)
    files = (_file(sibling, repository.sha) for sibling in repository.siblings if _is_safe(sibling.rfilename))
    return Listing(repository.sha, {file.name: file for file in files})


def _file(sibling: _Sibling, commit: str) -> RemoteFile:
    sha256 = sibling.lfs.sha256 if sibling.lfs and _HEX64.fullmatch(sibling.lfs.sha256) else None
    git_id = sibling.blob_id if sibling.blob_id and not sibling.lfs and _HEX40.fullmatch(sibling.blob_id) else None
    size = sibling.size if sibling.size is not None and sibling.size >= 0 else None
    fallback_key = hashlib.sha256(f"{commit}/{sibling.rfilename}".encode()).hexdigest()
    return RemoteFile(sibling.rfilename, size, sha256, git_id, sha256 or git_id or fallback_key)


def _is_safe(name: str) -> bool:
    """Return whether `name` is a relative path without special characters and without parts such as `..`."""
    segments = name.split("/")
    plain = all(_PLAIN_SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in segments)
    return plain and len(name) < 1000
