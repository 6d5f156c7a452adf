"""The cache on disk: damaged files, folders that cannot be written."""

import os
import random
from pathlib import Path

import pytest
from checkout import spoil

from _calcops_jit.cache import closure, locks, store
from _calcops_jit.compile import recording
from _calcops_jit.request import Request


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "one byte", "folder", "fifo", "loop", "gone", "foreign"]
)
def test_a_damaged_library_is_rebuilt_and_never_loaded(checkout, damage):
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    (library,) = checkout.libraries()
    spoil(library, damage)
    assert checkout.answer() == 1
    assert checkout.run().err == ""
    checkout.compiled()  # resets the count
    assert checkout.answer() == 1
    assert checkout.compiled() == 0


@pytest.mark.parametrize("part", ["manifest", "unit.o"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "one byte"])
def test_a_damaged_manifest_or_object_is_rebuilt(checkout, part, damage):
    assert checkout.answer() == 1
    damaged = list(checkout.cache.glob(f"*/*/{part}"))
    assert len(damaged) == {"manifest": 2, "unit.o": 1}[part]
    for path in damaged:
        content = bytearray(path.read_bytes())
        middle = len(content) // 2
        if damage == "empty":
            content.clear()
        elif damage == "truncated":
            del content[middle:]
        else:
            content[middle] ^= 1
        path.write_bytes(content)
    for library in checkout.libraries():
        library.unlink()
    checkout.compiled()  # resets the count
    assert checkout.answer() == 1
    assert checkout.compiled() == 1
    assert checkout.run().err == ""


def test_an_unwritable_cache_is_replaced_by_a_private_folder_with_one_warning(checkout, tmp_path):
    environment = {"CALCOPS_CACHE": "/dev/null/cache", "TMPDIR": tmp_path}
    child = checkout.run(**environment)
    folder = tmp_path / f"calcops-{os.getuid()}"
    assert (child.code, child.out) == (0, "1\n")
    assert child.err.splitlines()[0].startswith(
        f"calcops_jit: cannot write /dev/null/cache: Not a directory; using {folder}"
    )
    assert folder.stat().st_mode & 0o777 == 0o700
    again = checkout.run(**environment)
    assert (again.code, again.out, again.err) == (0, "1\n", "")
    assert checkout.compiled() == 1


def test_a_read_only_cache_is_read_second_and_never_written(checkout, tmp_path):
    assert checkout.answer() == 1
    shared = checkout.cache.rename(tmp_path / "shared")
    before = set(shared.rglob("*"))
    checkout.compiled()  # resets the count
    readonly = f"/nowhere:{shared}"
    assert checkout.answer(CALCOPS_CACHE_READONLY=readonly) == 1
    assert checkout.compiled() == 0
    assert not checkout.cache.exists()
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert checkout.answer(CALCOPS_CACHE_READONLY=readonly) == 2
    assert checkout.compiled() == 1
    assert len(checkout.libraries()) == 1
    assert set(shared.rglob("*")) == before


def test_a_truncated_library_or_one_with_a_flipped_bit_is_never_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("CALCOPS_CACHE", str(tmp_path))
    monkeypatch.setenv("TMPDIR", "/nowhere")
    source = tmp_path / "a.cpp"
    source.touch()
    request = Request(name="x", root=str(tmp_path), sources=(str(source),), cflags=())
    content = random.Random(0).randbytes(100_000)
    slot, _ = store.writable_slot(request)
    with locks.stage(slot) as folder:
        Path(folder, "built").write_bytes(content)
        recorder = recording.Recorder(request, [], recording.Before(str(tmp_path), set()))
        inputs = recorder.closure({str(source)}, set(request.tools))
        generation = store.place(slot, folder, f"{folder}/built", request, inputs)
        store.complete(generation, {})
    library = Path(generation.path)
    assert store.find(request)
    for size in range(0, len(content), 4096):
        library.write_bytes(content[:size])
        assert store.find(request) is None
    for position in random.Random(1).sample(range(len(content)), 50):
        damaged = bytearray(content)
        damaged[position] ^= 16
        library.write_bytes(damaged)
        assert store.find(request) is None
    library.write_bytes(content)
    assert store.find(request)


def test_the_cache_folder_follows_xdg_cache_home_and_home(checkout, tmp_path):
    def path(**variables):
        script = "from _calcops_jit.cache import folders; print(folders.own()[0])"
        return checkout.run(script, CALCOPS_CACHE=None, **variables).out.strip()

    assert path(XDG_CACHE_HOME=tmp_path / "x") == f"{tmp_path}/x/calcops"
    assert path(HOME=tmp_path, XDG_CACHE_HOME=None) == f"{tmp_path}/.cache/calcops"


@pytest.mark.parametrize(
    "body", [b'{"closure": {}, "seconds": 1}', b"{}", b'{"closure": {"unknown": 1}}']
)
def test_a_manifest_of_another_version_is_refused(body):
    with pytest.raises(ValueError, match="another version"):
        store.Manifest.parse(closure.digest(body).encode() + b"\n" + body)


def test_a_manifest_with_a_changed_byte_is_refused():
    body = b'{"request": {}}'
    checksum = closure.digest(body).encode()
    with pytest.raises(ValueError, match="damaged"):
        store.Manifest.parse(checksum + b"\n" + body.replace(b"request", b"requesT"))
