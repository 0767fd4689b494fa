#!/usr/bin/env bash
# Fuzzes all that parses bytes from a socket, the store or a peer's memory, under AddressSanitizer and
# UBSan.
#   tests/cpp/fuzz.sh [seconds for each target] [seed]
# With clang++, if it is installed, libFuzzer chooses the inputs, else a driver of our own mutates the seeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
unset LD_PRELOAD  # a sanitizer must come first

CXX=${CXX:-$(type -P clang++ || echo g++)}
JOBS=${JOBS:-$(nproc)}
SECONDS_EACH=${1:-60}
SEED=${2:-1}
FOLDER=build/fuzz-$(basename "$CXX")
TARGETS="hello rendezvous arena"
COMMON=$(ls csrc/base/*.cpp csrc/group/*.cpp csrc/transport/{arena,futex,group_memory,hello,process}.cpp)

mkdir -p "$FOLDER"
if "$CXX" --version | grep -q clang; then
  LINK=-fsanitize=fuzzer
  FUZZERS=$(printf "$FOLDER/libfuzzer_%s " $TARGETS)
else
  LINK=
  FUZZERS=
fi
make --no-print-directory -s -j "$JOBS" -f - all <<MAKE
FLAGS := -std=c++17 -O1 -g1 -Wall -Wextra -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -pthread
COMMON := $(printf "$FOLDER/%s.o " $COMMON)
.SECONDARY:
all: $(printf "$FOLDER/fuzz_%s " $TARGETS) $FUZZERS
$FOLDER/fuzz_%: $FOLDER/tests/cpp/fuzz_%.cpp.o $FOLDER/tests/cpp/fuzz_driver.cpp.o \$(COMMON)
	$CXX \$(FLAGS) -o \$@ \$^
$FOLDER/libfuzzer_%: $FOLDER/tests/cpp/fuzz_%.cpp.o \$(COMMON)
	$CXX \$(FLAGS) $LINK -o \$@ \$^
$FOLDER/%.cpp.o: %.cpp tests/cpp/fuzz.sh
	mkdir -p \$(@D)
	$CXX \$(FLAGS) ${LINK:+-fsanitize=fuzzer-no-link} -MMD -MP -c -o \$@ \$<
-include \$(shell find $FOLDER -name '*.d')
MAKE

export ASAN_OPTIONS=halt_on_error=1:detect_leaks=1:exitcode=66:handle_abort=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:exitcode=66
export FASTCOLL_DEBUG=OFF
for target in $TARGETS; do
  echo "== $target"
  program=$PWD/$FOLDER/fuzz_$target
  mkdir -p "$FOLDER/$target/corpus"
  if [ -n "$LINK" ]; then
    (
      cd "$FOLDER/$target"
      setarch "$(uname -m)" --addr-no-randomize "$program" --seeds corpus
      # Whole seconds; 0 would be without end.
      if ! setarch "$(uname -m)" --addr-no-randomize "${program%/*}/libfuzzer_$target" \
        -max_total_time=$((${SECONDS_EACH%.*} > 0 ? ${SECONDS_EACH%.*} : 1)) -seed="$SEED" -max_len=4096 corpus >log 2>&1; then
        cat log
        exit 1
      fi
      tail -3 log
    )
  else
    (cd "$FOLDER/$target" && timeout --kill-after=10 $((${SECONDS_EACH%.*} + 60)) setarch "$(uname -m)" --addr-no-randomize "$program" "$SECONDS_EACH" "$SEED")
  fi
done
echo "== no reports"
