"""A random project of C++ sources, headers and flags, and random edits of it."""

import os
import random
import shutil
from pathlib import Path

HEADERS = ["h0.h", "h1.h", "h2.h", "in/h3.h", "in/h4.h", "h5.h"]
# `base` has all headers and is searched last.
HEADER_FOLDERS = ["a", "b", "p/c", "q/c", "d", "e", "base"]
FLAGGED = [
    "-I{}",
    "-I {}",
    "-isystem {}",
    "-isystem{}",
    "-idirafter {}",
    "-iquote {}",
    "-Wp,-I,{}",
    "-I{}/../base",
]
# How a folder of headers is searched: by a flag with its path, by the option extra_include_paths,
# by a variable, by a response file (@), by a word of the compiler's command, or not at all.
WAYS = [*FLAGGED, *FLAGGED, "paths", "CPATH", "CPLUS_INCLUDE_PATH", "@", "CXX", "absent"]
DEFINED = ["", "-DFLAG=1", "-DFLAG=2", "-D FLAG=2", "-UFLAG"]
FORCED = ["", "", "", "-include {}/forced.h", "-include h5.h", "-imacros {}/forced.h"]
FUNCTION = """
{}int {}() {{
  unsigned sum = 0;
{}  return (sum {}) % 1000003;
}}
"""
EDITS: dict[str, int] = {}  # {name of a method of Project: how often it is drawn}


def edit(weight):
    """Return a decorator that registers an edit in EDITS."""

    def register(method):
        EDITS[method.__name__] = weight
        return method

    return register


class Project:
    """A project in a folder, with the flags and variables to load it.

    `compilers` are the commands of g++ and clang++.
    """

    def __init__(self, folder: Path, seed: int, compilers: list[str]):
        self.folder = folder
        self.seed = seed
        draw = self.draw = random.Random(seed)
        self.earlier: list[tuple[Path, str]] = []  # contents of files before edits
        self.history: list[str] = []
        self.count = 0  # makes the names of macros unique

        self.command = compilers[draw.random() > 0.75]
        self.order = draw.sample(HEADER_FOLDERS[:-1], len(HEADER_FOLDERS) - 1) + ["base"]
        self.ways = {name: draw.choice(WAYS) for name in HEADER_FOLDERS} | {"base": "-idirafter {}"}
        self.defined = draw.choice(DEFINED)
        self.forced = draw.choice(FORCED)
        self.repair()
        for _ in range(draw.randrange(8)):
            self.new_header()
        self.put("forced.h", self.header("h5.h"))
        visible = 'extern "C" __attribute__((visibility("default"))) '
        self.put("src/mine.cpp", self.source("answer", visible))
        self.put("src/inner/other.cpp", self.source("other"))

    # ---- files -----------------------------------------------------------------------------------

    def put(self, name: str | Path, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self.earlier.append((path, path.read_text()))
        path.write_text(text)

    def header(self, name: str) -> str:
        """Return the text of a header that defines a value. It may include headers that come
        later in HEADERS."""
        self.count += 1
        number = self.count
        index = HEADERS.index(name)
        lines = [f"#ifndef GUARD{number}", f"#define GUARD{number}", f"#undef V{index}"]
        lines.append(f"#define V{index} {self.draw.randrange(10000)}")
        for other in self.draw.sample(HEADERS[index + 1 :], min(2, len(HEADERS) - index - 1)):
            lines += self.directive(other)
        if self.draw.random() < 0.2:
            lines += [f"#if __has_include_next(<{name}>)", f"#include_next <{name}>", "#endif"]
        return "\n".join([*lines, "#endif", ""])

    def directive(self, name: str) -> list[str]:
        """Return lines that include a header or test whether it exists."""
        self.count += 1
        number = self.count
        letter = self.draw.choice(HEADER_FOLDERS)
        quoted = f'"{name}"'
        angled = f"<{name}>"
        spelled = self.draw.choice([quoted, angled])
        choices = [
            [f"#include {quoted}"],
            [f"#include {angled}"],
            [f"# include /* why */ {spelled}"],
            [f"#define N{number} {spelled}", f"#include N{number}"],
            [f"#if __has_include({spelled})", f"#include {spelled}", "#endif"],
            [
                f"#if __has_include({spelled})",
                f"#define E{number} 1",
                "#undef V0",
                f"#define V0 {number}",
                "#endif",
            ],
            ["#ifdef FLAG", f"#include {spelled}", "#endif"],
            ["#if FLAG == 2", f"#include {spelled}", "#endif"],
            [
                f'#if __has_include("../{letter}/{name}")',
                f'#include "../{letter}/{name}"',
                "#endif",
            ],
            [f"#include <../base/{name}>"],
            [f'#include "../base/{name}"'],
            [],
        ]
        return self.draw.choice(choices)

    def source(self, function: str, before: str = "") -> str:
        lines = []
        for name in self.draw.sample(HEADERS, 3):
            lines += self.directive(name)
        terms = [f"#ifdef V{i}\n  sum = sum * 31 + V{i};\n#endif\n" for i in range(len(HEADERS))]
        if function == "other":
            return "\n".join(lines) + FUNCTION.format(before, function, "".join(terms), "")
        lines.append("int other();")
        return "\n".join(lines) + FUNCTION.format(
            before, function, "".join(terms), "+ other() * 7u"
        )

    def options(self) -> tuple[dict, dict[str, str]]:
        """Return the options of load, and the environment."""
        paths = []
        cflags = [self.defined]
        compiler = [self.command]
        response_file = ""
        variables: dict[str, list[str]] = {}
        for name in self.order:
            way = self.ways[name]
            path = f"{self.folder}/{name}"
            if way == "paths":
                paths.append(path)
            elif way == "CXX":
                compiler.append(f"-I{path}")
            elif way == "@":
                response_file += f"-I{path}\n"
            elif way.endswith("PATH"):
                variables.setdefault(way, []).append(path)
            elif way != "absent":
                cflags.append(way.format(path))
        path = self.folder / "flags.rsp"
        if not path.is_file() or path.read_text() != response_file:
            path.write_text(response_file)
        cflags += [f"@{path}", self.forced.format(self.folder)]
        sources = [f"{self.folder}/src/mine.cpp", f"{self.folder}/src/inner/other.cpp"]
        options = {"sources": sources, "extra_include_paths": paths, "extra_cflags": cflags}
        environment = {name: ":".join(folders) for name, folders in variables.items()}
        return options, environment | {"CXX": " ".join(compiler)}

    def repair(self) -> None:
        """Write again the files that every build needs."""
        self.history.append("repair")
        for name in HEADERS:
            self.clear(self.folder / "base" / name)
            self.put(f"base/{name}", self.header(name))

    # ---- edits -----------------------------------------------------------------------------------

    def files(self, pattern: str = "*.h") -> list[Path]:
        return sorted(path for path in self.folder.rglob(pattern) if path.is_file())

    def place(self) -> Path:
        """Return a path where a header may be."""
        folder = self.draw.choice([*HEADER_FOLDERS, "src", "src/inner", "a/in"])
        return self.folder / folder / self.draw.choice(HEADERS)

    def clear(self, path: Path) -> None:
        """Remove what is at the path, and replace parents that are not folders by folders."""
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        for parent in path.parents:
            if os.path.lexists(parent) and not parent.is_dir():
                parent.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)

    @edit(5)
    def new_value(self):
        path = self.draw.choice(self.files())
        lines = path.read_text().split("\n")
        values = [i for i, line in enumerate(lines) if line.startswith("#define V")]
        index = values[0] if values else 0
        lines[index] = f"{lines[index].rpartition(' ')[0]} {self.draw.randrange(10000)}"
        status = path.stat()
        self.put(path, "\n".join(lines))
        if self.draw.random() < 0.4:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return path

    @edit(5)
    def new_header(self):
        path = self.place()
        if not path.is_file():
            self.clear(path)
        name = path.name if path.name in HEADERS else f"in/{path.name}"
        self.put(path, self.header(name))
        return path

    @edit(3)
    def remove_header(self):
        path = self.draw.choice(self.files())
        if "base" not in str(path) or self.draw.random() < 0.2:
            path.unlink()
        return path

    @edit(3)
    def rename_header(self):
        old, new = self.draw.choice(self.files()), self.place()
        if old != new and old.parent.parts[-1] != "base":
            self.clear(new)
            old.rename(new)
        return old, new

    @edit(7)
    def link(self):
        names = self.draw.sample(HEADER_FOLDERS[:-1], 2)
        folders = [self.folder / name for name in names]
        headers = [self.place(), self.place()]
        path, target = self.draw.choice([headers, folders])
        if path != target:
            self.clear(path)
            path.symlink_to(target)
        return path, target

    @edit(3)
    def rename_folder(self):
        names = self.draw.sample([*HEADER_FOLDERS[:-1], "a/in", "b/in"], 2)
        old, new = (self.folder / name for name in names)
        if old.exists() and old not in new.parents and new not in old.parents:
            self.clear(new)
            if os.path.lexists(old):
                old.rename(new)
        return old, new

    @edit(4)
    def empty_folder(self):
        folder = self.folder / self.draw.choice([*HEADER_FOLDERS[:-1], "a/in", "b/in", "q"])
        path = self.draw.choice([folder, self.place()])
        self.clear(path)
        path.mkdir()
        return path

    @edit(2)
    def touch(self):
        path = self.draw.choice(self.files("*"))
        path.touch()
        return path

    @edit(3)
    def edit_back(self):
        path, text = self.draw.choice(self.earlier or [(self.folder / "forced.h", "")])
        if path.is_file():
            self.put(path, text)
        return path

    @edit(2)
    def new_source(self):
        self.put("src/inner/other.cpp", self.source("other"))

    @edit(2)
    def new_flag(self):
        attribute = self.draw.choice(["defined", "forced", "ways", "order"])
        if attribute == "ways":
            self.ways[self.draw.choice(HEADER_FOLDERS[:-1])] = self.draw.choice(WAYS)
        elif attribute == "order":
            self.order = self.draw.sample(HEADER_FOLDERS[:-1], len(HEADER_FOLDERS) - 1) + ["base"]
        else:
            choices = {"defined": DEFINED, "forced": FORCED}[attribute]
            setattr(self, attribute, self.draw.choice(choices))
        return attribute

    def step(self, is_built: bool) -> None:
        """Make one to three edits. If the last build failed, mostly repair the project first.

        An edit ends early if the file system refuses it, for example behind a dangling link.
        """
        if not is_built and self.draw.random() < 0.8:
            self.repair()
        count = self.draw.choice([1, 1, 2, 3])
        for name in self.draw.choices(list(EDITS), EDITS.values(), k=count):
            try:
                self.history.append(f"{name} {getattr(self, name)() or ''}")
            except OSError as error:
                self.history.append(f"{name}: {error}")
