#!/usr/bin/env bash
# Builds the stress program with the layers below torch, without and with sanitizers, and runs it.
#   tests/cpp/sanitize.sh [--compile] [address|thread|plain]...     all by default; --compile runs nothing
# Objects stay in build/sanitize-<way>/, so a second run compiles only what has changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
unset LD_PRELOAD  # a sanitizer must come first

CXX=${CXX:-g++}
JOBS=${JOBS:-$(nproc)}
EFFORT=${EFFORT:-1}
SOURCES=$(ls csrc/{base,trace,shm,reduce,group}/*.cpp csrc/cpu/*.cpp csrc/cpu/*/*.cpp tests/cpp/stress*.cpp)
REDUCE=$(ls csrc/reduce/*.cpp csrc/base/dtype.cpp tests/cpp/reduce_test.cpp)
TRACE=$(ls csrc/base/*.cpp csrc/trace/*.cpp tests/cpp/trace_test.cpp)

flags() {
  case $1 in
    address) echo "-O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" ;;
    thread) echo "-O1 -fno-omit-frame-pointer -fsanitize=thread" ;;
    plain) echo "-O2" ;;
  esac
}

# build <way> <program> <source>...: uses make for dependencies and parallel compilation. The standard headers are
# compiled once for each way.
build() {
  local way=$1 program=$2
  shift 2
  mkdir -p "build/sanitize-$way"
  make --no-print-directory -s -j "$JOBS" -f - "build/sanitize-$way/$program" <<MAKE
FLAGS := -std=c++20 -g1 -Wall -Wextra -Icsrc $(flags "$way") -pthread
OBJECTS := $(printf "build/sanitize-$way/%s.o " "$@")
HEADERS := build/sanitize-$way/standard_headers.hpp
build/sanitize-$way/$program: \$(OBJECTS)
	$CXX \$(FLAGS) -o \$@ \$(OBJECTS)
build/sanitize-$way/%.o: % \$(HEADERS).gch
	mkdir -p \$(@D)
	$CXX \$(FLAGS) -include \$(HEADERS) -MMD -MP -c -o \$@ \$<
\$(HEADERS).gch: csrc/standard_headers.hpp tests/cpp/sanitize.sh
	$CXX \$(FLAGS) -x c++-header -o \$@ \$<
-include \$(OBJECTS:.o=.d)
MAKE
}

run() {
  [ -z "$COMPILE" ] || return 0
  echo "== $*"
  # A fixed layout of the address space, because ThreadSanitizer does not start with some random layouts.
  timeout --kill-after=10 "${LIMIT:-1200}" setarch "$(uname -m)" --addr-no-randomize "$@"
}

export ASAN_OPTIONS=halt_on_error=1:detect_leaks=1:exitcode=66:detect_stack_use_after_return=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:exitcode=66
# No suppressions.
export TSAN_OPTIONS=halt_on_error=1:exitcode=66:second_deadlock_stack=1:history_size=4

COMPILE=
if [ "${1:-}" = --compile ]; then
  COMPILE=yes
  shift
fi
WAYS=("$@")
[ ${#WAYS[@]} -gt 0 ] || WAYS=(plain address thread)

for way in "${WAYS[@]}"; do
  echo "== building $way"
  # shellcheck disable=SC2086
  build "$way" stress $SOURCES
  case $way in
    plain)
      build plain reduce_test $REDUCE
      run build/sanitize-plain/reduce_test
      run build/sanitize-plain/stress --effort "$EFFORT"
      run build/sanitize-plain/stress --processes --effort "$EFFORT"
      ;;
    address)
      build address reduce_test $REDUCE
      run build/sanitize-address/reduce_test --few
      build address ring_stores_test tests/cpp/ring_stores_test.cpp csrc/shm/ring_stores.cpp
      run build/sanitize-address/ring_stores_test
      build address pair_cells_test tests/cpp/pair_cells_test.cpp
      run build/sanitize-address/pair_cells_test
      build address trace_test $TRACE
      run build/sanitize-address/trace_test
      run build/sanitize-address/stress --effort "$EFFORT"
      run build/sanitize-address/stress --processes --effort "$EFFORT"
      ;;
    thread)
      build thread trace_test $TRACE
      run build/sanitize-thread/trace_test
      run build/sanitize-thread/stress --effort "$EFFORT"
      ;;
  esac
done
[ -n "$COMPILE" ] || echo "== no reports"
