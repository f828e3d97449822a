# The front door. The build itself is Meson + Ninja (meson.build); this installs what is missing and calls them.
#
#   make build     the command-line program at build/sidestream
#   make demo      build it and run its demo: a GPU where there is one, else the software device
#   make test      every test in every variant (gcc, clang with ASan+UBSan, clang with TSan), those in Python, and the checks
#   make quick     the tests in the gcc variant, those in Python, and the checks
#   make torch     PyTorch from PyPI (some GB) into build/.venv, so that the tests that need it run
#   make wheel     the Python package as a wheel for CPython 3.11 and newer, at build/wheel; 'pip install .' builds for this machine alone
#   make install   PREFIX=/usr/local, DESTDIR= for packagers
#   make format    clang-format over the C files
#   make clean     remove build/ (but for its Meson)
#
# BUILD=dir builds somewhere else than build/.

BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
export BUILD

.PHONY: all build demo test quick torch wheel install format clean distclean

all: build

build:
	@tools/setup build
	@tools/build product

demo: build
	@$(BUILD)/sidestream demo

test:
	@tools/setup test
	@tools/run-tests

quick:
	@tools/setup test
	@tools/run-tests --variant gcc --variant py

torch:
	@tools/setup torch

wheel:
	@tools/setup wheel
	@tools/wheel
	@tools/check-wheel

install: build
	@tools/build install "$(PREFIX)" "$(DESTDIR)"

format:
	@tools/setup test
	@tools/check-format --fix

# Keeps the virtual environment with Meson: it is a tool, not a product.
clean:
	@if [ -d "$(BUILD)" ]; then find "$(BUILD)" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +; fi

distclean:
	@rm -rf "$(BUILD)"
