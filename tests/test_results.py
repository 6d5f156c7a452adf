"""What pages say of the code and of measurements: names, test ids, options, counts, results."""

import re
import subprocess
import sys
import tomllib

import pytest
from programs import ROOT

sys.path.append(str(ROOT / "bench"))
import mutation_check
import results

PAGES = {}
for path in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")]:
    if not {".venv", "build", "node_modules"} & set(path.relative_to(ROOT).parts):
        PAGES[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
RESULTS = results.results()
# Names of other programs that no code here has.
FOREIGN = {"grad_fn", "mixed_type", "model_devi", "read_restart", "numb_aparam", "numb_fparam"}
# A link to a page whose label has a digit.
LINK = re.compile(r"\[([^]\[`]*\d[^]\[`]*)\]\(([^)#\s]+\.md)[^)]*\)")
CODE = (".py", ".pyi", ".cpp", ".cc", ".cu", ".h", ".toml", ".txt", ".ipynb", ".yml", ".silicon")


@pytest.fixture(scope="module")
def words():
    """Return all words of the code."""
    words = set(re.findall(r"\w+", (ROOT / "Makefile").read_text()))
    for folder in results.FOLDERS:
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in CODE and path.is_file():
                words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words | set(re.findall(r"\w+", (ROOT / "calcops_jit.py").read_text()))


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def without_results(text):
    return results.RESULT.sub("", text)


# ---- pages and the code -------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_names_in_backticks_occur_in_the_code(page, words):
    """A name has a `::`, a `_` or a call's brackets. Only its last part is looked for. Names of
    PyTorch, variables of the environment and first words of `nep.txt` are not looked at, nor are
    names of one word, which may be anybody's."""
    for code in re.findall(r"`([^`\n]+)`", without_blocks(PAGES[page])):
        name = re.fullmatch(r"([A-Za-z_][\w.:]*?)(?:<[^<>]*>)?(\(.*\))?", code)
        if not name or re.match(r"torch\b|c10\b|at\b|std\b|nep\d_|[A-Z_]+$", code):
            continue
        is_ours = "::" in name[1] or "_" in name[1] or name[2]
        is_file = (
            re.search(r"\.[a-z0-9]{1,8}$", name[1]) and not name[2] and "_" not in name[1][-8:]
        )
        last = re.split(r"\.|::", name[1])[-1]
        if is_ours and not is_file and last not in FOREIGN:
            assert last in words, f"{page} names `{code}`"


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names_exist(page):
    """As `file::test`, or as the title of a link to the file."""
    for file, test in re.findall(r'([\w/]+\.py)(?:::| ")(test_\w+)', PAGES[page]):
        (path,) = (ROOT / "tests").rglob(file.split("tests/")[-1])
        assert re.search(rf"^ *def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"


@pytest.mark.parametrize("page", PAGES)
def test_programs_have_the_options_that_a_page_gives_them(page):
    """Of programs in bench and examples. What follows ` -- ` is for another program."""
    commands = re.findall(r"(?<!/)((?:bench|examples)/[\w/]+\.py)((?: [^\s`|&;#]+)*)", PAGES[page])
    for program, arguments in commands:
        source = (ROOT / program).read_text()
        for option in re.findall(r"(?<= )--[\w-]+", arguments.partition(" -- ")[0]):
            assert f'"{option}"' in source, f"{page} gives {program} {option}"


@pytest.mark.parametrize("page", PAGES)
def test_make_has_the_targets_that_a_page_names(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"`make ([a-z][\w-]*)[^`]*`", PAGES[page])
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL):
        named += re.findall(r"^make ([a-z][\w-]*)", block, re.MULTILINE)
    for target in named:
        assert target in targets, f"{page} names make {target}"


@pytest.mark.parametrize("page", PAGES)
def test_extras_that_a_page_installs_are_those_of_the_project(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:'\.|calcops|\.whl)\[([\w,-]+)\]", PAGES[page]):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys(), (
            f"{page}: {extras}"
        )


@pytest.mark.parametrize("page", PAGES)
def test_pictures_exist(page):
    for source in re.findall(r'(?:src|srcset)="([^"]+)"', PAGES[page]):
        assert (ROOT / page).parent.joinpath(source).is_file(), f"{page} shows {source}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_the_same_versions_of_pytorch_and_python(page):
    readme = PAGES["README.md"]
    for pattern in (r"PyTorch \(?(\d\.\d+ to \d\.\d+)", r"Python (\d\.\d+ to \d\.\d+)"):
        (expected,) = set(re.findall(pattern, readme.replace("your PyTorch", "PyTorch")))
        if "mindspore" not in page:  # which has another Python
            assert set(re.findall(pattern, PAGES[page])) <= {expected}


# ---- results ------------------------------------------------------------------------------------


def test_every_result_is_complete_and_has_a_name_of_its_own():
    begun = sum(text.count("<!-- result ") for text in PAGES.values())
    assert begun == len(RESULTS) == len({result.name for result in RESULTS})


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.name)
def test_a_result_whose_code_has_changed_says_so(result):
    is_marked = result.text() in PAGES[str(result.page.relative_to(ROOT))]
    assert is_marked, "make docs"


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.name)
def test_a_result_is_what_its_command_printed(result):
    assert result.printed == result.digest_of_print(), f"make results only={result.name}"


def test_the_picture_of_potentials_is_of_the_tables_as_they_are():
    pillow = pytest.importorskip("PIL.Image")
    import potential_picture

    with pillow.open(potential_picture.PICTURE) as picture:
        assert picture.info["Source"] == potential_picture.source(), "bench/potential_picture.py"


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.name)
def test_a_result_gives_command_date_and_commit(result):
    run = r", \d{4}-\d\d-\d\d, commit [0-9a-f]{7,}( with edits)?, .*, PyTorch [\d.]+(, earlier code)?\*"
    assert re.fullmatch(re.escape(f"*`{result.command}`") + run, result.about)


@pytest.mark.parametrize("page", PAGES)
def test_a_table_or_text_with_times_is_a_result(page):
    """Times have a unit in the head of their column, or behind the number that begins a cell."""
    if page.endswith("cuda_predictions.md"):
        pytest.skip("predictions are no measurements")
    text = without_results(PAGES[page])
    head = r"^\|.*(?:, (?:s|ms|us|minutes)\b|relative \||time /).*\|\n\|(?:---\|)+$"
    cell = r"^\|.*\| \d[\d.,]* (?:s|ms|us|minutes)\b.*\|$"
    found = re.search(f"{head}|{cell}", text, re.MULTILINE)
    assert not found, f"{page}: {found[0]}"
    for block in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert not re.search(r"\d (?:ms|us|µs)\b", block)


@pytest.mark.parametrize("page", PAGES)
def test_counts_of_faults_are_those_of_the_table(page):
    """`N of M faults` belong to a table with M rows and a fault each, which comes below. Numbers in
    words are not read."""
    for match in re.finditer(r"(\d+) of (\d+) faults", PAGES[page]):
        tables = re.findall(
            r"^\|.*(?:fault|wrong).*\|\n\|[-|]+\n((?:\|.*\n)+)",
            PAGES[page][match.end() :],
            re.MULTILINE,
        )
        rows = tables[0].splitlines()
        missed = sum("**not found**" in row for row in rows)
        assert len(rows) == int(match[2])
        assert missed in (0, len(rows) - int(match[1]))


@pytest.mark.parametrize("page", PAGES)
def test_numbers_in_a_link_to_results_are_among_them(page):
    """Such as [0.20-0.24](calcops/nep/README.md#speed), where both occur in a result of that page."""
    for label, target in LINK.findall(PAGES[page]):
        path = ((ROOT / page).parent / target).resolve()
        bodies = "".join(result.body for result in RESULTS if result.page == path)
        numbers = re.findall(r"\d+(?:[.,]\d+)*(?:e-\d+)?", label) if bodies else []
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\.?\d)", bodies), (
                f"{page} quotes {number} of {label}, which {target} doesn't have"
            )


# ---- the program that prints them ---------------------------------------------------------------

MARKS = """\
# A page

<!-- result {name} of {paths}: {command} -->

| old |

*`{command}`, 2026-01-02, commit 0123abc, a machine, PyTorch 2.15.0*
<!-- /result 00000000 11111111 -->

The end.
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Return a function that writes a page with a result, and returns its path."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "bench").mkdir()
    (tmp_path / "README.md").write_text("")
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops/kernel.cpp").write_text("// a comment\nint a;  // another\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit = ["commit", "-q", "--allow-empty", "-m", "x"]
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", tmp_path, *author, *commit], check=True)
    path = tmp_path / "bench" / "page.md"

    def write(command, paths="ops", name="one"):
        path.write_text(MARKS.format(name=name, command=command, paths=paths))
        return path

    return write


def run_main(monkeypatch, *arguments):
    """Return the exit status of the program."""
    monkeypatch.setattr(sys, "argv", ["results.py", *arguments])
    try:
        results.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return int(end.code)
    return 0


def test_printing_replaces_what_stands_between_the_marks(page, monkeypatch):
    path = page("echo '| new |'")
    assert run_main(monkeypatch, "page.md") == 0
    text = path.read_text()
    assert "| new |" in text
    assert "| old |" not in text
    assert text.startswith("# A page\n\n<!-- result one of ops: echo")
    assert text.endswith(" -->\n\nThe end.\n")
    (result,) = results.results()
    assert not result.is_older()
    assert "0123abc" not in result.about


def test_output_without_a_table_becomes_a_block_of_text(page, monkeypatch):
    path = page("echo 12 us")
    run_main(monkeypatch, "one")
    assert " -->\n```text\n12 us\n```\n*`echo 12 us`, " in path.read_text()


@pytest.mark.parametrize("command", ["exit 3", "false | cat", "echo $CALCOPS_NOT_SET"])
def test_a_command_that_cannot_run_leaves_the_page_and_fails(page, monkeypatch, capsys, command):
    path = page(command)
    before = path.read_text()
    assert run_main(monkeypatch, "one") == 1
    assert path.read_text() == before
    expected = "set CALCOPS_NOT_SET" if "$" in command else "exit status"
    assert expected in capsys.readouterr().err


def test_a_pattern_chooses_results_by_a_line_of_the_list(page, monkeypatch, capsys):
    path = page("echo '| new |'")
    before = path.read_text()
    assert run_main(monkeypatch) == 0
    assert re.fullmatch(r"earlier code +2026-01-02 +bench/page.md: one\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="no result matches two"):
        run_main(monkeypatch, "two", "^current")
    assert path.read_text() == before


def test_only_an_edit_of_the_code_makes_a_result_older(page, monkeypatch):
    path = page("echo '| new |'")
    run_main(monkeypatch, "one")
    kernel = results.ROOT / "ops/kernel.cpp"
    printed = path.read_text()
    kernel.write_text("// other words\n\nint a;\n")
    run_main(monkeypatch, "--mark")
    assert path.read_text() == printed
    kernel.write_text("int b;\n")
    run_main(monkeypatch, "--mark")
    assert re.search(r"PyTorch \S+, earlier code\*\n<!-- /result", path.read_text())
    kernel.write_text("int a;\n")
    run_main(monkeypatch, "--mark")
    assert path.read_text() == printed


def test_docstrings_and_comments_of_python_are_no_code(page):
    module = results.ROOT / "ops/module.py"
    digests = []
    for text in ('"""Words."""\nx = 1  # one\n', '"""Other\n\nwords."""\n\nx = 1\n', "x = 2\n"):
        module.write_text(text)
        digests.append(results.digest_of("ops"))
    assert digests[0] == digests[1] != digests[2]


def test_an_edit_of_what_was_printed_is_found(page, monkeypatch):
    path = page("echo '| 12 |'")
    run_main(monkeypatch, "one")
    path.write_text(path.read_text().replace("| 12 |", "| 13 |", 1).replace("| 12 |", "| 13 |"))
    (result,) = results.results()
    assert result.printed != result.digest_of_print()


def test_headers_modules_and_the_program_of_the_command_count(page):
    command = "python bench/measure.py"
    files = {
        "bench/measure.py": "import calcops.used\nx = {}\n",
        "calcops/used.py": "x = {}\n",
        "contracts/include/calcops/shared.h": "int x = {};\n",
        "ops/own.h": "#include <calcops/shared.h>\nint y = {};\n",
        "_calcops_jit/request.py": 'flags = ["-O{}"]\n',
    }
    (results.ROOT / "ops/kernel.cpp").write_text('#include "own.h"\n')
    for name, text in files.items():
        (results.ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (results.ROOT / name).write_text(text.format(3))
    before = results.digest_of("ops/kernel.cpp", command)
    for name, text in files.items():
        (results.ROOT / name).write_text(text.format(2))
        assert results.digest_of("ops/kernel.cpp", command) != before, name
        (results.ROOT / name).write_text(text.format(3))
    assert results.digest_of("ops/kernel.cpp", command) == before


def test_texts_that_look_like_comments_are_code(page):
    module = results.ROOT / "ops/module.py"
    kernel = results.ROOT / "ops/kernel.cpp"
    digests = set()
    for text in ("a", "b"):
        module.write_text(f'x = "one # {text}"\n')
        digests.add(results.digest_of("ops"))
        kernel.write_text(f'auto x = "http://{text}";\n')
        digests.add(results.digest_of("ops"))
        kernel.write_text(f'auto x = R"(one // {text})";\n')
        digests.add(results.digest_of("ops"))
    assert len(digests) == 6


@pytest.mark.parametrize("text", ["| a |\n\nno end\n", ""])
def test_a_result_without_an_end_or_with_the_name_of_another_is_an_error(page, text):
    path = page("echo 1")
    again = path.read_text()
    path.write_text(f"<!-- result two of ops: x -->\n{text}{again}" if text else again + again)
    with pytest.raises(ValueError, match="expected"):
        results.results()


def test_a_path_without_code_is_an_error(page):
    with pytest.raises(FileNotFoundError, match="expected code in ops/absent, got none"):
        results.digest_of("ops/absent")


def test_the_failing_test_is_not_taken_from_the_output_of_the_contract_test():
    printed = "FAILED calcops::force reference after 0.3 s: element 1\n"
    failed = "FAILED tests/operators/test_force.py::test_a[b] - AssertionError: x - y\n"
    assert (
        mutation_check.failed_test(printed + failed) == "tests/operators/test_force.py::test_a[b]"
    )
    assert mutation_check.failed_test(printed) == ""
