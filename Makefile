# Everything runs from a clean checkout: `make demo` and `make test` create .venv themselves.
# PYTHON is the interpreter from which .venv is made. gpu-check and sanitize-gpu run PYTHON itself, or .venv's without it.

supported = 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
candidates = $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14)
python = .venv/bin/python
pip = $(python) -m pip install --disable-pip-version-check -q
sources = $(wildcard \
  contracts/runtime/*.cpp contracts/runtime/*.h _calcops_jit/shadow/*.h _calcops_jit/shadow/torch/*.h contracts/include/calcops/*.h \
  ops/*.h ops/*/*.h ops/*/*.cpp ops/*/*.cu calcops/ops/*/*.h calcops/ops/*/*.cpp calcops/ops/*/*.cu \
  calcops/*/*.h calcops/*/*.cpp examples/*/*.h examples/*/*.cpp examples/*/*.cc examples/*/*.cu \
  bench/*.cpp bench/*.cu tests/contracts/*.cpp _calcops_jit/testing/*.cpp \
  tests/operators/cuda_on_cpu/*.h tests/operators/cuda_on_cpu/*.cpp tests/operators/arm/*.h tests/operators/arm/*.cpp)

oldest = $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
operator_tests = $(foreach folder,$(notdir $(wildcard ops/* calcops/ops/*)),$(wildcard tests/operators/test_$(folder)*.py))
# The sanitizer finds __cxa_throw only if libstdc++ is preloaded, too.
preload = LD_PRELOAD=$$(c++ -print-file-name=lib$(config).so):$$(c++ -print-file-name=libstdc++.so)
environment_asan = $(preload) ASAN_OPTIONS=detect_leaks=0 CALCOPS_CFLAGS='-fsanitize=address -fno-omit-frame-pointer -g'
environment_ubsan = $(preload) CALCOPS_CFLAGS='-fsanitize=undefined -fno-sanitize-recover=all -g'
environment_x86-64 = CALCOPS_CFLAGS=-march=x86-64
environment_avx2 = CALCOPS_CFLAGS=-march=x86-64-v3
environment_neon = CALCOPS_CFLAGS=-mcpu=generic
# One worker more than processors, because tests spend a third of their time waiting. loadfile gives a worker whole files, so
# that the tests of a file share its fixtures. no-loadscope-reorder keeps the order of conftest.py, in which the slowest
# files come first.
workers := $(shell echo $$(( $$(nproc) + 1 )))
pytest = -m pytest -n $(workers) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The help shows the comments that begin with ##, ### or ####.
list = sed -n 's/^\([a-z-]*\):.* $(1) \(.*\)/  make \1\t\2/p' Makefile | expand -t 24
help:
	@echo "to use"; $(call list,##)
	@echo "to develop"; $(call list,###)
	@echo "with other programs, which these commands install in build/ or look for"; $(call list,####)

demo: .venv/.examples ## build the operators; run two examples
	$(python) examples/quickstart.py
	$(python) examples/warp_perspective/straighten.py

check: lint .venv/.test ### after an edit: lint and the quick tests; only=force: of the files whose names contain it
	$(python) $(pytest) -m "not long and not slow" $(if $(only),$(wildcard tests/test_*$(only)*.py tests/*/test_*$(only)*.py))

check_config = $(if $(config),$(if $(environment_$(config)),,$(error config=$(config): expected asan, ubsan, x86-64, avx2 or neon)))
test: .venv/.test ### what a user relies on, in some 9 minutes; config=asan|ubsan|x86-64|avx2|neon: the operators' tests, built so
	$(check_config)$(environment_$(config)) $(python) $(pytest) -m "not long" $(if $(config),$(operator_tests))

test-all: .venv/.test ### also the tests marked `long`: combinations of cases, long examples, foreign programs
	$(python) $(pytest)

test-long: .venv/.test ### the tests marked `long` alone
	$(python) $(pytest) -m long

test-arm: .venv/.test #### the CPU kernels on ARM, under emulation; needs g++-aarch64-linux-gnu and qemu-user-static
	$(python) -m pytest -s tests/operators/test_arm.py

# This makes another environment and compiles every library again: some 5 GB and many minutes.
test-oldest: .venv-oldest/.test ### tests of loader, contracts and operators with the oldest supported PyTorch
	.venv-oldest/bin/python $(pytest) -m "not long" tests/loader tests/contracts $(operator_tests)

venv: .venv/.base ### create .venv; install again only after pyproject.toml changes

build: .venv/.base ## build the operators into the cache
	$(python) -m calcops_jit build

# A library lies among the sources only while it is packed, because an import of this checkout would use it.
prebuilt = ops/prebuilt calcops/ops/prebuilt build/wheel
setup = --config-settings=--global-option=
wheel: .venv/.wheel $(torch:%=.venv-torch-%/.ready) ## dist/*.whl for machines without a compiler; torch="2.10 2.13": for these PyTorches, too
	rm -rf $(prebuilt)
	trap 'rm -rf $(prebuilt)' EXIT; set -e; for python in $(python) $(torch:%=.venv-torch-%/bin/python); do \
	  $$python -m calcops_jit prebuild; $$python -c 'import calcops.ops'; $$python -m calcops_jit prebuild calcops_models; \
	  label=$$label$$($$python -c 'import re, torch; print(re.sub(r"\W+", ".", f".{torch.__version__}"), end="")'); \
	done; $(python) -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist . \
	  $(setup)build $(setup)--build-base=build/wheel $(setup)egg_info $(setup)--tag-build=+torch$$label \
	  --config-settings=--build-option=--plat-name=linux_x86_64

dist: .venv/.release ### dist/release/: what PyPI gets, tried in bare environments; pythons="3.11 3.12" torch="2.10 2.15": in these
	$(python) tests/release.py $(if $(address),--address $(address)) $(if $(pythons),--pythons $(pythons)) $(if $(torch),--torch $(torch))

# If find_toolkit finds no nvcc, PyPI's wheels serve as the toolkit. Their release must be the one of torch.version.cuda.
cuda: .venv/.base ## build for CPU and CUDA; without nvcc on this machine, install it from PyPI
	@$(python) -c 'import sys; from _calcops_jit.cuda import find_toolkit; sys.exit(not find_toolkit()[0])' || { \
	  echo "no nvcc for this PyTorch here: installing nvcc from PyPI into .venv"; $(pip) \
	  "cuda-toolkit[nvcc]==$$($(python) -c 'import torch; print(torch.version.cuda)').*"; }
	CALCOPS_CUDA=1 $(python) -m calcops_jit build

lint: .venv/.lint ### ruff and clang-format, as CI runs them
	$(python) -m ruff check
	$(python) -m ruff format --check
	.venv/bin/clang-format --dry-run -Werror $(sources)

format: .venv/.lint ### rewrite every file in the project's format
	$(python) -m ruff check --fix
	$(python) -m ruff format
	.venv/bin/clang-format -i $(sources)

docs: .venv/.base ### after an edit: generate tables, stubs and the C++ header; mark results of earlier code
	PYTHONPATH=. $(python) bench/generate_docs.py
	$(python) bench/results.py --mark

results: $(if $(only),.venv/.bench,.venv/.base) ### list the results in the pages; only=force: print anew those whose line has it; only=earlier
	$(python) bench/results.py $(if $(only),'$(only)')

mutations: .venv/.test ### print anew which deliberate faults the contract test finds; three quarters of an hour
	$(python) bench/results.py mutations

bench: .venv/.bench ### every benchmark that needs no other program
	for file in $(filter-out %deepmd.py %lammps.py %nep.py %training.py %torch_sim.py %spline_cells.py,$(wildcard bench/bench_*.py)); do $(python) $$file || exit 1; done

gpu-check: ### all that needs a GPU; parts=build,kernels: these alone; PYTHON=python3: without pip and .venv
	@PYTHONPATH=. $(or $(PYTHON),$(wildcard $(python)),python3) bench/gpu_check.py \
	  $(if $(parts),--parts $(parts)) $(if $(seconds),--seconds $(seconds))

sanitize-gpu: $(if $(PYTHON),,.venv/.base) ### compute-sanitizer over every CUDA kernel; without a GPU it says so and skips
	PYTHONPATH=. $(or $(PYTHON),$(python)) bench/gpu_check.py sanitize

test-examples: .venv/.test ### the tests of examples and packages
	$(python) $(pytest) --durations=20 tests/examples tests/packages

mindspore: .venv/.base build/mindspore/.installed #### call the operators from MindSpore
	$(python) examples/mindspore_aot/build.py
	build/mindspore/bin/python examples/mindspore_aot/run.py build/mindspore_aot
	build/mindspore/bin/python examples/mindspore_aot/run_force.py build/mindspore_aot

lammps: .venv/.base #### a model as a pair style of LAMMPS, on two ranks
	$(MAKE) -C examples/train_potential

train: .venv/.examples ## train a Deep Potential on silicon (some ten minutes), package it, run it in ASE, time a step
	$(python) examples/train_potential/make_frames.py silicon
	$(python) -m calcops train --settings examples/train_potential/silicon.toml
	$(python) examples/train_potential/deploy.py
	$(python) examples/train_potential/step_time.py

clean: ## delete .venv and what was built in this folder; for the cache: python -m calcops_jit clean
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The rm is for Debian without python3-venv, which leaves half an environment behind.
define make_environment
@for p in $(candidates); do \
  if $$p -c $(supported) 2>/dev/null; then set -x; $$p -m venv $(@D:/bin=) && exit; rm -rf $(@D:/bin=); exit 1; fi; \
done; echo 'CalcOps needs Python 3.11 to 3.14: install one or name it, make $(or $(MAKECMDGOALS),venv) PYTHON=/path/to/python3'; exit 1
endef
.venv/bin/pip .venv-oldest/bin/pip:
	$(make_environment)
.PRECIOUS: .venv-torch-%/bin/pip  # otherwise make deletes it as an intermediate file
.venv-torch-%/bin/pip:
	$(make_environment)

.venv/.%: pyproject.toml | .venv/bin/pip
	@echo "installing the dependencies in pyproject.toml into .venv (PyTorch with CUDA: some 3 GB, once)"
	$(pip) -e '.$(if $(filter-out base,$*),[$*])'
	@touch $@

.venv-oldest/.test: pyproject.toml | .venv-oldest/bin/pip
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -q 'torch==$(oldest).*' -e '.[test]'
	@touch $@

.venv-torch-%/.ready: pyproject.toml | .venv-torch-%/bin/pip
	$(@D)/bin/python -m pip install --disable-pip-version-check -q 'torch==$*.*' -e .
	@touch $@

graph-potential: .venv/.base build/graph_potential/.installed #### SevenNet's forces from the operator
	build/graph_potential/bin/python -W ignore examples/sevennet/compare.py

mace: .venv/.base build/mace/.installed #### install MACE, whose models `build/mace/bin/python -m calcops graph mace` packages

# These environments have SevenNet or MACE, which need different releases of e3nn, and their dependencies. A .pth file adds
# .venv's packages, so that PyTorch is installed only once.
build/graph_potential/.installed build/mace/.installed: | .venv/.base
	$(python) -m venv $(@D)
	echo "import site; site.addsitedir('$$($(python) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	$(@D)/bin/python -m pip install --disable-pip-version-check -q $(if $(findstring mace,$@),'mace-torch==0.3.16','sevenn==0.13.0')
	touch $@

# MindSpore has wheels for Python 3.9 to 3.12. Its libraries must not be in one environment with PyTorch's.
build/mindspore/.installed:
	@for p in $(PYTHON) python3.12 python3.11 python3.10 $$HOME/.pyenv/versions/3.1[0-2]*/bin/python python3; do \
	  if $$p -c 'import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then \
	    set -ex; $$p -m venv build/mindspore; \
	    build/mindspore/bin/pip install --disable-pip-version-check -q 'mindspore==2.10.0' 'numpy<2'; \
	    touch $@; exit; fi; \
	done; echo 'MindSpore needs Python 3.9 to 3.12: install one or name it, make mindspore PYTHON=/path/to/python3'; exit 1

# The libraries with which `make bench` compares. --no-deps: PyTorch is installed already, and the C++ library of deepmd-kit
# needs none of the other dependencies. It gets a folder of its own, because `lmp` of .venv would load its plugin.
.venv/.bench: .venv/.test
	$(pip) --no-deps kornia kornia_rs torchvision
	$(pip) --no-deps --upgrade --target build/deepmd_kit deepmd-kit
	@touch $@

.PHONY: help demo check test test-all test-long test-arm test-oldest venv build wheel dist cuda lint format docs results mutations bench gpu-check sanitize-gpu test-examples mindspore graph-potential mace train lammps clean
