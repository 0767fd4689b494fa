#!/usr/bin/env bash
# Builds the stress program with the layers below torch, without and with sanitizers, and runs it.
#   tests/cpp/sanitize.sh [--compile] [address|thread|plain]...   all by default; --compile runs nothing
# Objects stay in build/sanitize-<way>/, so a second run compiles only what has changed. EFFORT=3 repeats under the
# sanitizers as often as EFFORT=1 does without.
set -euo pipefail
cd "$(dirname "$0")/../.."
unset LD_PRELOAD  # a sanitizer must come first
. tests/cpp/join.sh

CXX=${CXX:-g++}
JOBS=${JOBS:-$(nproc)}
EFFORT=${EFFORT:-1}

flags() {
  case $1 in
    address) echo "-O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" ;;
    thread) echo "-O1 -fno-omit-frame-pointer -fsanitize=thread" ;;
    plain) echo "-O2" ;;
  esac
}

# The programs of a way. All link what they use of the layers below torch.
programs() {
  case $1 in
    address) echo stress reduce_test ring_stores_test pair_cells_test trace_test ;;
    thread) echo stress trace_test ;;
    plain) echo stress reduce_test ;;
  esac
}

# The units, those that take longest first: each file of csrc/reduce by itself, because it sets an instruction set for
# all that follows, and the files of each other folder together.
CORE=$(printf '%s\n' csrc/reduce/*.cpp | sort; printf '%s\n' csrc/cpu/{point_to_point,hosts,algorithms} csrc/{cpu,shm,group,trace,base})
STRESS_A="stress stress_harness stress_job stress_collectives stress_groups stress_faults stress_endings stress_digests"
STRESS_B="stress_letters stress_point_to_point stress_point_to_point_faults stress_hosts"

# build <way>: compiles in parallel what has changed.
build() {
  local folder=build/sanitize-$1 one units=() tests=()
  for one in $CORE; do
    if [ -d "$one" ]; then join "$folder/$one.cpp" "$one"/*.cpp; else join "$folder/$one" "$one"; fi
    units+=("$folder/${one%.cpp}.o")
  done
  # shellcheck disable=SC2086
  {
    join "$folder/stress_a.cpp" $(printf 'tests/cpp/%s.cpp ' $STRESS_A)
    join "$folder/stress_b.cpp" $(printf 'tests/cpp/%s.cpp ' $STRESS_B)
  }
  for one in $(programs "$1"); do
    [ "$one" = stress ] || join "$folder/$one.cpp" "tests/cpp/$one.cpp"
    tests+=("$folder/$one")
  done
  make --no-print-directory -s -j "$JOBS" -f - all <<MAKE
FLAGS := -std=c++20 -g1 -Wall -Wextra -I. -Icsrc -Itests/cpp $(flags "$1") -pthread
.SECONDARY:
all: ${tests[*]}
$folder/core.a: ${units[*]}
	rm -f \$@
	ar rcs \$@ \$^
$folder/stress: $folder/stress_a.o $folder/stress_b.o $folder/core.a
	$CXX \$(FLAGS) -o \$@ \$^
$folder/%_test: $folder/%_test.o $folder/core.a
	$CXX \$(FLAGS) -o \$@ \$^
$folder/%.o: $folder/%.cpp tests/cpp/sanitize.sh
	$CXX \$(FLAGS) -MMD -MP -c -o \$@ \$<
-include \$(shell find $folder -name '*.d')
MAKE
}

# run <program> <argument>...: prints the output when the program has ended.
run() {
  local output status=0
  # A fixed layout of the address space, because ThreadSanitizer does not start with some random layouts.
  output=$(timeout --kill-after=10 "$LIMIT" setarch "$(uname -m)" --addr-no-randomize "$@" 2>&1) || status=$?
  printf '== %s\n%s\n' "$*" "$output"
  return "$status"
}
export -f run
export LIMIT=${LIMIT:-1200}

export ASAN_OPTIONS=halt_on_error=1:detect_leaks=1:exitcode=66:detect_stack_use_after_return=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:exitcode=66
# No suppressions.
export TSAN_OPTIONS=halt_on_error=1:exitcode=66:second_deadlock_stack=1:history_size=4

compile=
if [ "${1:-}" = --compile ]; then
  compile=yes
  shift
fi
WAYS=("$@")
[ ${#WAYS[@]} -gt 0 ] || WAYS=(thread address plain)  # the longest runs first

RUNS=()
for way in "${WAYS[@]}"; do
  echo "== building $way"
  build "$way"
  for program in $(programs "$way"); do
    run=build/sanitize-$way/$program
    case $way/$program in
      thread/stress) RUNS+=("$run --effort $EFFORT") ;;
      */stress) RUNS+=("$run --effort $EFFORT" "$run --processes --effort $EFFORT") ;;
      address/reduce_test) RUNS+=("$run --few") ;;
      *) RUNS+=("$run") ;;
    esac
  done
done

[ -z "$compile" ] || exit 0

# Two at a time, because ranks wait more than they compute. The first failure ends the runs.
printf '%s\n' "${RUNS[@]}" | xargs -P 2 -I{} bash -c 'run {} || exit 255'
echo "== no reports"
