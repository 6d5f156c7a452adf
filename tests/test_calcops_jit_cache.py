"""The cache on disk: damaged artefacts, folders that cannot be written."""
# ruff: noqa: F811 - pytest's fixtures are imported and then named as arguments

import os
from pathlib import Path

import pytest
from test_calcops_jit import checkout  # noqa: F401


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "one byte", "folder", "fifo", "loop", "gone", "foreign"]
)
def test_a_damaged_library_is_rebuilt_and_never_loaded(checkout, damage):
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    (library,) = checkout.libraries()
    content = library.read_bytes()
    library.unlink()
    if damage == "truncated":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        library.touch()
    elif damage == "one byte":
        library.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif damage == "folder":
        library.mkdir()
    elif damage == "fifo":
        os.mkfifo(library)
    elif damage == "loop":
        library.symlink_to(library)
    elif damage == "foreign":
        library.write_bytes(Path("/bin/sh").read_bytes())
    assert checkout.answer() == 1 and checkout.run().err == ""
    checkout.compiled()
    assert (checkout.answer(), checkout.compiled()) == (1, 0)


@pytest.mark.parametrize("part", ["manifest", "unit.o"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "one byte"])
def test_a_damaged_manifest_or_object_is_made_again(checkout, part, damage):
    assert checkout.answer() == 1
    damaged = list(checkout.cache.glob(f"*/*/{part}"))
    assert len(damaged) == {"manifest": 2, "unit.o": 1}[part]
    for path in damaged:
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"empty": b"", "truncated": content[:middle], "one byte": flipped}[damage])
    for library in checkout.libraries():
        library.unlink()
    checkout.compiled()
    assert (checkout.answer(), checkout.compiled()) == (1, 1)
    assert checkout.run().err == ""


def test_where_the_cache_cannot_be_written_a_private_folder_serves_with_one_warning(checkout, tmp_path):
    environment = {"CALCOPS_CACHE": "/dev/null/cache", "TMPDIR": tmp_path}
    child = checkout.run(**environment)
    folder = tmp_path / f"calcops-{os.getuid()}"
    assert (child.code, child.out) == (0, "1\n")
    assert child.err.splitlines()[0].startswith(
        f"calcops_jit: cannot write /dev/null/cache: Not a directory; using {folder}"
    )
    assert folder.stat().st_mode & 0o777 == 0o700
    again = checkout.run(**environment)
    assert (again.code, again.out, again.err, checkout.compiled()) == (0, "1\n", "", 1)


def test_the_cache_is_found_by_xdg_and_by_home(checkout, tmp_path):
    where = "from _calcops_jit import cache; print(cache.folders()[0])"
    path = lambda **env: checkout.run(where, CALCOPS_CACHE=None, **env).out.strip()  # noqa: E731
    assert path(XDG_CACHE_HOME=tmp_path / "x") == f"{tmp_path}/x/calcops"
    assert path(HOME=tmp_path, XDG_CACHE_HOME=None) == f"{tmp_path}/.cache/calcops"
