"""The commands `python -m calcops_jit build where why`. test_export.py has `export`,
test_processes.py `clean`."""

import hashlib
import json
import os
import re

import pytest
from checkout import ANSWER, CALL, MAIN, Checkout, spoil, with_cpuinfo


def test_build_builds_and_where_does_not(checkout):
    where = checkout.main("where")
    assert where.code == 0
    assert "not built yet" in where.out
    assert str(checkout.cache) in where.out
    assert checkout.main().code == 2
    assert not checkout.cache.exists()

    build = checkout.main("build")
    (library,) = checkout.libraries()
    assert build.out.strip() == str(library)
    assert str(library) in checkout.main("where").out
    assert checkout.main("why").out == f"nothing changed: {library}\n"


def test_a_build_that_fails_is_a_message_and_exit_status_1(checkout):
    checkout.write("ops/tiny/tiny.cpp", "int f( {\n")
    child = checkout.main("build")
    assert child.code == 1
    assert "tiny.cpp:1:" in child.err
    assert "Traceback" not in child.err
    assert checkout.main("why").code == 1


def test_a_home_of_an_unknown_user_is_a_folder_of_this_name_as_in_a_shell(shared_checkout):
    where = shared_checkout.main("where", CALCOPS_CACHE="~nosuch/x", cwd="/")
    assert where.out.startswith("cache    /~nosuch/x\n")


def test_a_name_means_the_library_of_this_folder(checkout):
    """Equal sources in two folders share a build. The commands know both folders."""
    for name in "first", "second":
        checkout.put(f"{name}/mine.cpp", ANSWER.format("return 1;"))
        checkout.loaded(sources=[f"{name}/mine.cpp"])
    assert checkout.compiled() == 1
    checkout.put("second/mine.cpp", ANSWER.format("return 2;"))
    first, second = (
        checkout.main("why", "mine", cwd=checkout.project / name) for name in ("first", "second")
    )
    assert first.out.startswith("nothing changed: ")
    assert f"{checkout.project}/second/mine.cpp changed" in second.out
    unclear = checkout.main("export", "exported", "mine", cwd=checkout.project)
    assert (unclear.code, "cannot choose one of several libraries `mine`" in unclear.err) == (
        1,
        True,
    )
    assert f"{checkout.project}/first/mine.cpp" in unclear.err
    assert not (checkout.project / "exported").exists()
    (checkout.project / "second/mine.cpp").unlink()
    assert checkout.main("where", "mine", cwd="/").code == 0


def test_clean_says_how_many_libraries_it_removed(checkout):
    assert checkout.main("clean").err.endswith(f"libraries in {checkout.cache}: 0 removed\n")
    checkout.main("build")
    assert checkout.main("clean").err.endswith(" 2 removed\n")
    assert checkout.main("clean").err.endswith(f"libraries in {checkout.cache}: 0 removed\n")


COMMANDS = [("where",), ("why",), ("why", "mine"), ("why", "runtime"), ("build", "mine")]
COMMANDS += [("clean",), ("build",)]


def check_commands(checkout, **variables):
    for command in COMMANDS:
        child = checkout.main(*command, **variables)
        assert "Traceback" not in child.err, (command, child.err)


@pytest.mark.parametrize("kind", ["file", "loop"])
def test_no_command_shows_a_traceback_if_the_cache_is_no_folder(shared_checkout, tmp_path, kind):
    cache = tmp_path / "cache"
    if kind == "file":
        cache.touch()
    else:
        cache.symlink_to("cache")
    check_commands(shared_checkout, CALCOPS_CACHE=cache)


@pytest.mark.parametrize("damage", ["folder", "loop"])
def test_no_command_shows_a_traceback_if_a_manifest_is_damaged(checkout, damage):
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    assert checkout.loaded() == 1
    assert checkout.answer() == 1
    for manifest in checkout.cache.glob("*/*/manifest"):
        spoil(manifest, damage)
    check_commands(checkout)


@pytest.mark.parametrize(
    "change",
    [{"facts": None}, {"asked": {"an option of another version": 1}, "facts": {"format": 5}}],
)
def test_no_command_shows_a_traceback_if_a_manifest_is_of_another_version(checkout, change):
    checkout.put("mine.cpp", ANSWER.format("return 1;"))
    assert checkout.loaded() == 1
    (manifest,) = checkout.cache.glob("mine-*/*/manifest")
    record = json.loads(manifest.read_bytes().partition(b"\n")[2]) | change
    text = json.dumps(record).encode()
    manifest.write_bytes(hashlib.sha256(text).hexdigest()[:32].encode() + b"\n" + text)
    check_commands(checkout)
    assert "no library `mine`" in checkout.main("why", "mine").err


@pytest.mark.parametrize("variables", [{"CALCOPS_CUDA": "yes"}, {"CXX": "g++ '"}])
def test_a_wrong_variable_is_one_line_of_a_command(shared_checkout, variables):
    child = shared_checkout.main("why", **variables)
    assert child.code == 1
    assert len(child.err.splitlines()) == 1
    assert next(iter(variables)) in child.err


NO_HOME = """
import pwd
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody
"""


def test_a_user_without_home_is_asked_for_a_cache(checkout, tmp_path):
    variables = {"HOME": None, "CALCOPS_CACHE": None, "XDG_CACHE_HOME": None}
    child = checkout.run(NO_HOME + MAIN, arguments=["build"], cwd=tmp_path, **variables)
    assert child.code == 1
    assert "fix: export CALCOPS_CACHE=" in child.err
    assert not (tmp_path / "~").exists()


def test_a_cache_whose_files_have_no_times_is_used(checkout):
    """Some tools that copy folders set all times to 1970."""
    assert checkout.answer() == 1
    for path in checkout.files():
        os.utime(path, (0, 0))
    checkout.compiled()
    assert checkout.answer() == 1
    assert checkout.compiled() == 0


@pytest.fixture(scope="module")
def shared_checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("commands"))


def key(checkout, preamble: str = "") -> str:
    """Return the key for a CI cache."""
    child = checkout.run(preamble + MAIN, arguments=["where", "--key"])
    assert re.fullmatch(r"calcops-[0-9a-f]{8,}\n", child.out), child.err
    return child.out


def test_the_key_changes_with_a_header_and_not_with_the_folder(tmp_path):
    checkout = Checkout(tmp_path)
    first = key(checkout)
    checkout.path = checkout.path.rename(tmp_path / "moved")
    assert key(checkout) == first
    checkout.write("ops/tiny/tiny.h", "#define ANSWER 2\n")
    assert key(checkout) != first


# The words of /proc/cpuinfo of an ARM processor.
FEATURES = (
    "fp asimd aes atomics fphp asimdhp asimdrdm fcma asimddp sha3 sve asimdfhm sve2 i8mm bf16"
)
PROCESSOR = "processor\t: {}\nFeatures\t: {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n\n"
AS_ARM = """
import os
os.uname = lambda real=os.uname(): os.uname_result([*real[:4], "aarch64"])
"""


def test_the_key_names_the_processor(shared_checkout):
    """The compiler uses the instruction set of this processor, and on ARM tunes for its model."""
    flags = "processor\t: 0\nflags\t\t: sse4_2 avx fma {}\n"
    x86 = [flags.format(word) for word in ("avx2 avx512f", "avx2", "")]
    arm = [(FEATURES, "0xd4f"), (FEATURES, "0xd40"), (FEATURES.replace(" bf16", ""), "0xd4f")]
    keys = [key(shared_checkout, with_cpuinfo(text)) for text in x86]
    for features, model in arm:
        text = "".join(PROCESSOR.format(i, features, model) for i in range(4))
        keys.append(key(shared_checkout, AS_ARM + with_cpuinfo(text)))
    assert len(set(keys)) == 6
    assert keys[0] == key(shared_checkout, with_cpuinfo(x86[0]))


def test_the_compiler_gets_mcpu_on_arm(shared_checkout):
    """The compiler fails, since it is one for x86-64. Its log has the flags."""
    script = AS_ARM + with_cpuinfo(PROCESSOR.format(0, FEATURES, "0xd4f")) + CALL
    hook = shared_checkout.hook('case "$*" in *tiny.cpp*) exit 1;; esac')
    shared_checkout.run(script, **hook)
    (command,) = shared_checkout.commands()
    assert " -mcpu=native " in command
    assert "-march=" not in command


# ---- libraries of load ---------------------------------------------------------------------------


def test_build_and_why_accept_the_name_of_a_library_of_load(checkout):
    why = checkout.main("why", "mine", cwd="/")
    assert why.code == 1
    assert "mine" in why.err
    assert "fix: " in why.err

    checkout.put("headers/answer.h", "#define VALUE 1\n")
    source = checkout.put(
        "mine.cpp", '#include "answer.h"\n' + ANSWER.format("return VALUE + MORE;")
    )
    options = {"extra_cflags": "-DMORE=1", "extra_include_paths": "headers"}
    assert checkout.loaded(**options) == 2
    (library,) = checkout.libraries("mine")
    assert checkout.main("why", "mine", cwd="/").out == f"nothing changed: {library}\n"

    header = checkout.put("headers/answer.h", "#define VALUE 2\n")
    why = checkout.main("why", "mine", cwd="/")
    assert why.code == 1
    assert str(header) in why.out

    checkout.compiled()
    assert checkout.main("build", "mine", cwd="/").out.strip() in map(
        str, checkout.libraries("mine")
    )
    assert checkout.compiled() == 1
    assert checkout.loaded(**options) == 3
    assert checkout.compiled() == 0
    assert "mine" in checkout.main("build", "other").err.partition("there are: ")[2]
    source.unlink()
    assert str(source) in checkout.main("why", "mine").err


def test_the_help_names_every_command(shared_checkout):
    child = shared_checkout.main("--help")
    for command in ("build", "where", "why", "export", "prebuild", "clean"):
        assert re.search(rf"^ +{command} +\w", child.out, re.MULTILINE), child.out
