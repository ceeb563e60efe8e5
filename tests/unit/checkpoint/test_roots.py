"""The root of checkpoints: a directory and a bucket behave alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from obstore.exceptions import PreconditionError
from obstore.store import MemoryStore

from ft_transport.checkpoint import bucket_files, bucket_index
from ft_transport.checkpoint.bucket_files import BucketFiles, list_objects
from ft_transport.checkpoint.bucket_index import BucketIndex
from ft_transport.checkpoint.bucket_root import BucketRoot
from ft_transport.checkpoint.digested_file import DigestedFile, write_small
from ft_transport.checkpoint.files import CheckpointFiles, files_at
from ft_transport.checkpoint.manifest import CHECKSUM, MANIFEST_NAME, FileEntry
from ft_transport.checkpoint.roots import CheckpointRoot, root_at
from ft_transport.checkpoint.stored_files import ReadRetries, read_file
from ft_transport.errors import CheckpointDamagedError, CheckpointError, CheckpointInUseError, ConfigurationError
from ft_transport.runtime.regular_files import UnusableFileError

_URL = "s3://bucket/run"


@dataclass
class Place:
    """Where roots are made for a test, all with the same checkpoints."""

    make: Callable[[], CheckpointRoot]
    files: Callable[[str], CheckpointFiles]

    def save(self, root: CheckpointRoot, number: int, content: bytes, attempt: int) -> FileEntry:
        root.begin(number, attempt)
        location = root.attempt(number, attempt)
        root.wait_for(number, attempt, lambda: None)
        files = self.files(location)
        entry = write_small(files, "__0_0.distcp", content)
        files.sync()
        root.commit(number, attempt, b"list")
        return entry

    def content(self, root: CheckpointRoot, number: int, entry: FileEntry) -> bytes:
        location = root.find(number)
        assert location is not None
        assert self.files(location).read_list(MANIFEST_NAME, max_bytes=100) == b"list"
        return read_file(self.files(location), entry, CHECKSUM, ReadRetries(0))


pytestmark = pytest.mark.usefixtures("obstore_ready")


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        return Place(lambda: root_at(tmp_path / "root", "step"), files_at)
    return _bucket(MemoryStore())


def _bucket(store: Any) -> Place:
    return Place(lambda: BucketRoot(_URL, "step", store), lambda location: BucketFiles(location, store))


@pytest.fixture
def root(place: Place) -> Iterator[CheckpointRoot]:
    made = place.make()
    made.claim("this group", 0)
    yield made
    made.release()


def test_an_empty_root_has_no_checkpoints(place: Place) -> None:
    assert place.make().numbers() == []
    assert place.make().find(5) is None


def test_a_checkpoint_is_listed_from_its_commit_on(place: Place, root: CheckpointRoot) -> None:
    root.begin(5, 17)
    location = root.attempt(5, 17)
    entry = write_small(place.files(location), "__0_0.distcp", b"content")
    assert root.numbers() == []
    root.commit(5, 17, b"list")
    assert root.numbers() == place.make().numbers() == [5]
    assert root.find(5) == root.final(5, 17)
    assert place.content(place.make(), 5, entry) == b"content"


def test_leftovers_of_an_interrupted_run_are_deleted(place: Place, root: CheckpointRoot) -> None:
    entry = place.save(root, 4, b"complete", 1)
    root.begin(5, 17)
    location = root.attempt(5, 17)
    left = write_small(place.files(location), "__0_0.distcp", b"half")
    root.release()
    other = place.make()
    other.claim("the next run", 0)
    other.recover()
    assert other.numbers() == [4]
    assert place.content(other, 4, entry) == b"complete"
    with pytest.raises(FileNotFoundError):
        place.files(location).open(left).length()
    other.release()


def test_a_replacement_has_another_identity(place: Place, root: CheckpointRoot) -> None:
    place.save(root, 5, b"old", 1)
    old = root.identity(root.final(5, 1))
    entry = place.save(root, 5, b"new", 2)
    assert place.content(root, 5, entry) == b"new"
    assert old is not None
    assert root.identity(root.final(5, 1)) != old
    root.retire(5)
    assert root.identity(root.final(5, 2)) is None


def test_a_discarded_attempt_leaves_the_earlier_checkpoint(place: Place, root: CheckpointRoot) -> None:
    entry = place.save(root, 5, b"old", 1)
    root.begin(5, 2)
    location = root.attempt(5, 2)
    left = write_small(place.files(location), "__0_0.distcp", b"half of the new one")
    root.discard(5)
    assert place.content(root, 5, entry) == b"old"
    with pytest.raises(FileNotFoundError):
        place.files(location).open(left).length()
    root.discard(5)


@pytest.mark.parametrize("content", [b"shared", b""])
def test_a_shared_file_outlives_the_checkpoint_that_wrote_it(
    place: Place, root: CheckpointRoot, content: bytes
) -> None:
    entry = place.save(root, 1, content, 1)
    own = place.files(root.final(1, 1)).identity(entry)
    last = root.final(1, 1)
    for number in (2, 3):
        root.begin(number, number)
        files = place.files(root.attempt(number, number))
        assert files.share(entry, own, last)
        assert files.identity(entry) == own
        files.put_shared(files.shared)
        root.commit(number, number, b"list")
        last = root.final(number, number)
        root.delete(root.retire(number - 1))
        assert root.numbers() == [number]
        assert place.content(place.make(), number, entry) == content
    root.delete(root.retire(3))
    root.begin(4, 4)
    assert not content or not place.files(root.attempt(4, 4)).share(entry, own, last), (
        "the file was deleted with its last checkpoint"
    )


def test_a_file_with_other_content_is_not_shared(place: Place, root: CheckpointRoot) -> None:
    entry = place.save(root, 1, b"first", 1)
    own = place.files(root.final(1, 1)).identity(entry)
    root.delete(root.retire(1))
    place.save(root, 1, b"other", 1)
    root.begin(2, 2)
    assert not place.files(root.attempt(2, 2)).share(entry, own, root.final(1, 1))


def test_clearing_deletes_all(place: Place, root: CheckpointRoot) -> None:
    for number in range(3):
        place.save(root, number, b"content", number)
    root.clear()
    assert root.numbers() == place.make().numbers() == []


def test_only_one_group_at_a_time_owns_a_root(
    place: Place, root: CheckpointRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_index, "_BEAT_S", 0.01)
    root.release()
    root.claim("the first group", 0)
    other = place.make()
    with pytest.raises(CheckpointInUseError, match="the first group"):
        other.claim("the second group", 0)
    root.release()
    other.claim("the second group", 0)
    other.release()
    root.claim("this group", 0)


# ------------------------------------------------------------------------------------------------------- buckets alone


def test_a_file_is_stored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    files = BucketFiles(f"{_URL}/step-1/attempt-{1:016x}", store)
    pieces = [bytes([number]) * (5 << 20) for number in range(8)]
    with DigestedFile(files, "__0_0.distcp") as file:
        file.write(b"head", *pieces)
        entry = file.finish()
    sizes = {path.rpartition(".")[2]: each[0] for path, each in list_objects(store).items()}
    assert sizes == {"0": 16 << 20, "1": 16 << 20, "2": (8 << 20) + 4}
    assert read_file(files, entry, CHECKSUM, ReadRetries(0)) == b"head" + b"".join(pieces)
    with DigestedFile(files, "empty") as file:
        assert read_file(files, file.finish(), CHECKSUM, ReadRetries(0)) == b""


def test_an_owner_that_was_suspended_can_change_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_index, "LEASE_S", 0.2)
    monkeypatch.setattr(bucket_index, "_LOOK_S", 0.05)
    monkeypatch.setattr(bucket_index, "_BEAT_S", 1000.0)
    place = _bucket(MemoryStore())
    suspended, other = place.make(), place.make()
    suspended.claim("suspended", 0)
    entry = place.save(suspended, 1, b"of the first", 1)
    suspended.begin(2, 2)
    other.claim("another", 0)
    other.recover()
    other.begin(2, 3)
    write_small(place.files(other.attempt(2, 3)), "__0_0.distcp", b"of the second")
    for action in (
        lambda: suspended.commit(2, 2, b"list"),
        lambda: suspended.discard(2),
        lambda: suspended.retire(1),
        suspended.clear,
        suspended.recover,
    ):
        with pytest.raises(CheckpointInUseError, match=r"lost its claim.*another"):
            action()
    suspended.release()
    other.commit(2, 3, b"list")
    assert other.numbers() == [1, 2]
    assert place.content(other, 1, entry) == b"of the first"
    other.release()


def test_a_claim_of_an_exited_process_on_this_host_ends_at_once() -> None:
    store = MemoryStore()
    exited = BucketRoot(_URL, "step", store)
    exited.claim("exited", 0)
    index = msgspec.json.decode(bytes(obstore.get(store, "steps.json").bytes()))
    index["owner"]["start"] += 1  # so no process with this ID runs that has started then
    obstore.put(store, "steps.json", msgspec.json.encode(index))
    other = BucketRoot(_URL, "step", store)
    other.claim("the next run", 0)
    other.release()
    exited.release()


def test_objects_of_other_programs_are_never_deleted() -> None:
    store = MemoryStore()
    others = [
        "step-5/.metadata", "step-5/__0_0.distcp", "weights/model.safetensors", "step-5/attempt-1/x",
        "other/step-5/attempt-0000000000000001/x", "notes.txt", ".probe-results/run1.csv", ".probe-cfg.yaml",
    ]  # fmt: skip
    for path in others:
        obstore.put(store, path, b"of another program")
    place = _bucket(store)
    root = place.make()
    root.claim("this group", 0)
    place.save(root, 5, b"content", 1)
    root.clear()
    root.release()
    assert sorted(list_objects(store)) == sorted([*others, "steps.json"])


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff", b'{"format":2}', b'{"attempts":{"1":"../../x"}}', b'{"attempts":{"x":"0"}}',
        b'{"attempts":{"-1":"0000000000000001"}}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_an_invalid_index_is_refused(content: bytes) -> None:
    store = MemoryStore()
    obstore.put(store, "steps.json", content)
    with pytest.raises(UnusableFileError):
        BucketRoot(_URL, "step", store).numbers()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"a":1}', b'{"__0_0.distcp":"../x"}', b'{"__0_0.distcp":"/step-1/attempt-1/x"}']
)
def test_invalid_references_are_refused(content: bytes) -> None:
    store = MemoryStore()
    folder = f"step-1/attempt-{1:016x}"
    obstore.put(store, f"{folder}/shared.json", content)
    with pytest.raises(UnusableFileError):
        BucketFiles(f"{_URL}/{folder}", store).open(FileEntry("__0_0.distcp", 1, "0" * 16))


@pytest.mark.parametrize(
    "url", ["http://host/x", "memory://", "s3://", "s3:///", "file:///x", "s3://bucket?x", "S3://b/x"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="bucket"):
        BucketRoot(url, "step", MemoryStore())


@pytest.fixture
def bucket() -> tuple[MemoryStore, Place, CheckpointRoot]:
    store = MemoryStore()
    place = _bucket(store)
    return store, place, place.make()


_Bucket = tuple[MemoryStore, Place, CheckpointRoot]


def test_a_commit_that_arrives_late_does_not_take_effect_after_its_attempt_was_discarded(bucket: _Bucket) -> None:
    store, place, root = bucket
    root.claim("this group", 0)
    place.save(root, 5, b"old", 1)
    root.begin(5, 2)
    late = obstore.head(store, "steps.json")
    root.discard(5)
    with pytest.raises(PreconditionError):
        obstore.put(store, "steps.json", b"{}", mode=bucket_files.version_of(late))
    root.release()


def test_without_its_index_a_prefix_with_checkpoints_is_not_used(bucket: _Bucket) -> None:
    store, place, root = bucket
    root.claim("this group", 0)
    place.save(root, 5, b"content", 1)
    root.release()
    obstore.delete(store, "steps.json")
    before = sorted(list_objects(store))
    with pytest.raises(CheckpointError, match=r"steps\.json beside the checkpoints"):
        place.make().claim("the next run", 0)
    assert sorted(list_objects(store)) == before


def test_the_objects_of_a_replaced_checkpoint_are_deleted(bucket: _Bucket) -> None:
    store, place, root = bucket
    root.claim("this group", 0)
    for attempt in range(5):
        place.save(root, 5, b"content", attempt)
        root.delete([])
    assert sum(".distcp." in path for path in list_objects(store)) == 1
    root.release()


def test_while_it_is_unknown_what_is_shared_nothing_is_deleted(bucket: _Bucket) -> None:
    store, place, root = bucket
    root.claim("this group", 0)
    for number in (1, 2):
        place.save(root, number, b"content", number)
    obstore.put(store, f"step-1/attempt-{1:016x}/shared.json", b"damaged")
    root.recover()
    root.delete(root.retire(2))
    assert root.numbers() == [1]
    assert sum(".distcp." in path for path in list_objects(store)) == 2
    root.release()


def test_a_newcomer_whose_requests_are_slow_does_not_take_over(
    bucket: _Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_index, "LEASE_S", 0.3)
    monkeypatch.setattr(bucket_index, "_BEAT_S", 0.2)
    monkeypatch.setattr(bucket_index, "_LOOK_S", 0.01)
    _, place, root = bucket
    root.claim("alive", 0)
    look = BucketIndex._beat_of
    delays_s = iter([0.0, 0.5])

    def slowly(*args: Any) -> Any:
        found = look(*args)
        threading.Event().wait(next(delays_s, 0.0))  # Nobody sets it: the answer is late.
        return found

    monkeypatch.setattr(BucketIndex, "_beat_of", slowly)
    with pytest.raises(CheckpointInUseError, match="alive"):
        place.make().claim("newcomer", 0.1)
    root.release()


def test_parts_of_another_length_are_damage_although_their_sum_is_right(bucket: _Bucket) -> None:
    store, _, _ = bucket
    files = BucketFiles(f"{_URL}/step-1/attempt-{1:016x}", store)
    entry = write_small(files, "__0_0.distcp", bytes(20 << 20))
    for number, length in ((0, (16 << 20) - 5), (1, (4 << 20) + 5)):
        obstore.put(store, f"step-1/attempt-{1:016x}/__0_0.distcp.{number}", bytes(length))
    with pytest.raises(CheckpointDamagedError):
        read_file(BucketFiles(f"{_URL}/step-1/attempt-{1:016x}", store), entry, CHECKSUM, ReadRetries(0))
