// Stress test of the CPU path below torch: transports, algorithms and the engine. Ranks are threads
// of this process, or separate processes.
//
//   stress [--processes] [--only <part of a test's name>] [--effort <n>] [--rounds <n>]
//
// tests/cpp/sanitize.sh builds and runs it under the sanitizers.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "stress_harness.hpp"

int main(int argc, char** argv) {
  bool processes = false;
  std::string only;
  int rounds = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--processes") == 0) processes = true;
    if (i + 1 < argc && std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
    if (i + 1 < argc && std::strcmp(argv[i], "--effort") == 0)
      stress::effort = std::atoi(argv[i + 1]);
    if (i + 1 < argc && std::strcmp(argv[i], "--rounds") == 0) rounds = std::atoi(argv[i + 1]);
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> failures;
  int ran = 0;
  for (int round = 0; round < rounds; ++round) {
    for (const auto& tests : {stress::collectiveTests(), stress::pointToPointTests(),
                              stress::groupTests(), stress::hostTests(), stress::faultTests(),
                              stress::endingTests(), stress::digestTests()}) {
      for (const stress::Test& test : tests) {
        if (std::string(test.name).find(only) == std::string::npos) continue;
        if (processes ? !test.processes : !test.threads) continue;
        for (const int ranks : test.ranks) {
          const std::string name =
              fastcoll::concat(test.name, " on ", ranks, processes ? " processes" : " threads");
          // Before a fork only this thread of the parent may run.
          if (!processes) stress::watch(name, 120);
          const auto start = fastcoll::Clock::now();
          bool passed = true;
          try {
            if (processes) {
              stress::runAsProcesses(
                  ranks,
                  [&](stress::Rank& rank) {
                    stress::watch(name, 120);
                    test.body(rank);
                  },
                  test.dies);
            } else {
              stress::runAsThreads(ranks, test.body);
            }
          } catch (const std::exception& error) {
            passed = false;
            failures.push_back(fastcoll::concat(name, ": ", error.what()));
          }
          ++ran;
          const auto took = std::chrono::duration<double>(fastcoll::Clock::now() - start).count();
          std::printf("%-55s %7.2f s  %s\n", name.c_str(), took, passed ? "ok" : "FAILED");
        }
      }
    }
  }
  for (const std::string& failure : failures) std::printf("FAILED %s\n", failure.c_str());
  std::printf("%d tests, %zu failures\n", ran, failures.size());
  return failures.empty() && ran > 0 ? 0 : 1;
}
