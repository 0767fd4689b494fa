#!/usr/bin/env bash
# Fuzzes with libFuzzer the code that parses bytes from a socket, the store or a peer's memory, under AddressSanitizer
# and UBSan. Needs clang++.
#   tests/cpp/fuzz.sh [seconds for each target] [seed]
set -euo pipefail
cd "$(dirname "$0")/../.."
unset LD_PRELOAD  # a sanitizer must come first
. tests/cpp/join.sh

CXX=${CXX:-clang++}
JOBS=${JOBS:-$(nproc)}
SECONDS_EACH=${1:-60}
SEED=${2:-1}
FOLDER=build/fuzz
TARGETS="hello rendezvous arena"

if [ -z "$(type -P "$CXX")" ]; then
  echo "libFuzzer comes with clang++, which is not here: apt-get install clang" >&2
  exit 1
fi
join "$FOLDER/base.cpp" csrc/base/*.cpp
join "$FOLDER/group.cpp" csrc/group/*.cpp
join "$FOLDER/shm.cpp" csrc/shm/{arena,group_memory,hello,process}.cpp
for target in $TARGETS; do
  join "$FOLDER/fuzz_$target.cpp" "tests/cpp/fuzz_$target.cpp"
done
make --no-print-directory -s -j "$JOBS" -f - all <<MAKE
FLAGS := -std=c++20 -O1 -g1 -Wall -Wextra -I. -Icsrc -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -pthread
.SECONDARY:
all: $(printf "$FOLDER/fuzz_%s " $TARGETS)
$FOLDER/fuzz_%: $FOLDER/fuzz_%.o $FOLDER/base.o $FOLDER/group.o $FOLDER/shm.o
	$CXX \$(FLAGS) -fsanitize=fuzzer -o \$@ \$^
$FOLDER/%.o: $FOLDER/%.cpp tests/cpp/fuzz.sh
	$CXX \$(FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c -o \$@ \$<
-include \$(shell find $FOLDER -name '*.d')
MAKE

export ASAN_OPTIONS=halt_on_error=1:detect_leaks=1:exitcode=66:handle_abort=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:exitcode=66
export FASTCOLL_DEBUG=OFF FUZZ_CORPUS=corpus
for target in $TARGETS; do
  echo "== $target"
  program=$PWD/$FOLDER/fuzz_$target
  mkdir -p "$FOLDER/$target/corpus"
  (
    cd "$FOLDER/$target"
    # Whole seconds; 0 would mean no limit.
    if ! setarch "$(uname -m)" --addr-no-randomize "$program" \
      -max_total_time=$((${SECONDS_EACH%.*} > 0 ? ${SECONDS_EACH%.*} : 1)) -seed="$SEED" -max_len=4096 corpus >log 2>&1; then
      cat log
      exit 1
    fi
    tail -3 log
  )
done
echo "== no reports"
