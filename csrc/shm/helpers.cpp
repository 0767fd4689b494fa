#include "shm/helpers.hpp"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <exception>
#include <utility>

#include "base/clock.hpp"
#include "base/cores.hpp"
#include "base/worker_pool.hpp"
#include "shm/futex.hpp"

namespace fastcoll {
namespace {

constexpr std::chrono::microseconds kSpin{300};
constexpr std::chrono::milliseconds kStay{20};
constexpr int kSpins = 64;  // between two looks at the clock, or before the core is yielded
// A try of the other way takes kTries jobs. The last kTimed of them are timed, because the first
// wake the helpers. It must cost less than kBetter of the usual way to become that.
constexpr int kTries = 7;
constexpr int kTimed = 4;
constexpr double kBetter = 0.95;
constexpr int kFirstCycle = 16;
constexpr int kLastCycle = 2048;

constexpr std::size_t roundUp(std::size_t bytes) {
  return (bytes + Helpers::kUnit - 1) / Helpers::kUnit * Helpers::kUnit;
}

}  // namespace

thread_local Helpers* Helpers::current_ = nullptr;

Helpers::Lent::Lent(Helpers& helpers, int threads, bool always) noexcept : before_(current_) {
  helpers.always_ = always;
  threads = std::clamp(threads, 1, kMost);
  helpers.threads_.store(threads, std::memory_order_relaxed);
  if (threads == 1 || helpers.closed_) return;
  current_ = &helpers;
  try {
    for (int number = 1; number < threads; ++number) {
      const std::uint64_t bit = std::uint64_t{1} << number;
      if ((helpers.alive_.fetch_or(bit) & bit) != 0) continue;
      try {
        runOnWorker([self = helpers.shared_from_this(), number, node = presentNode()] {
          const BoundTo near(coresOfNode(node));
          self->help(number);
        });
      } catch (...) {
        helpers.alive_.fetch_and(~bit);
        throw;
      }
    }
  } catch (const std::exception&) {  // out of threads: fewer help
  }
}

Helpers::Lent::~Lent() {
  current_ = before_;
}

void Helpers::Choice::add(double spent) {
  // Jobs during which the thread lost its core count little.
  const auto mix = [spent](double& known) {
    known = known == 0 ? spent : known + (std::min(spent, 4 * known) - known) / 4;
  };
  if (tries == 0) {
    mix(cost);
    if (++jobs == cycle) tries = kTries;
    return;
  }
  if (tries <= kTimed) mix(tried);
  if (--tries > 0) return;
  const bool better = tried < kBetter * cost;
  cycle = better ? kFirstCycle : std::min(2 * cycle, kLastCycle);
  if (better) usual = !usual, cost = tried;
  jobs = 0;
  tried = 0;
}

Helpers::Choice& Helpers::choiceOf(const Job& job) {
  const int length = std::bit_width(job.bytes);
  const auto kind = reinterpret_cast<std::uintptr_t>(job.run) / 16;
  Choice& choice = choices_[(kind + 7u * static_cast<unsigned>(length)) % choices_.size()];
  if (choice.run != job.run || choice.length != length) choice = {job.run, length};
  return choice;
}

void Helpers::run(Job job) noexcept {
  Helpers* const outer = std::exchange(current_, nullptr);  // a part has no parts
  Choice& choice = choiceOf(job);
  const bool helped = always_ || choice.helps();
  const TimePoint start = Clock::now();
  helped ? share(job) : job.run(job.context, 0, job.bytes);
  current_ = outer;
  if (always_) return;
  const std::chrono::duration<double, std::nano> time = Clock::now() - start;
  choice.add(time.count() / static_cast<double>(job.bytes));
}

void Helpers::share(Job job) noexcept {
  const auto threads = static_cast<std::size_t>(threads_.load(std::memory_order_relaxed));
  // Two chunks for each thread: a late one then costs the others less.
  job.chunk = std::max(
      {kLeastChunk, roundUp(job.bytes / (2 * threads)), roundUp(job.bytes / (kChunks / 2))});
  const std::uint64_t chunks = (job.bytes + job.chunk - 1) / job.chunk;
  job_ = job;
  done_.store(0, std::memory_order_relaxed);
  const std::uint64_t number = next_.load(std::memory_order_relaxed) / kNumber + 1;
  next_.store(number * kNumber + chunks * kChunks, std::memory_order_seq_cst);
  jobs_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) != 0) futexWakeAll(&jobs_);
  while (take()) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; ++spins) {
    spins % kSpins == kSpins - 1 ? static_cast<void>(::sched_yield()) : cpuRelax();
  }
}

/// Runs a chunk of the present job; false if there is none to take.
bool Helpers::take() noexcept {
  std::uint64_t next = next_.load(std::memory_order_acquire);
  do {
    if (!isOpen(next)) return false;
  } while (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acquire));
  const Job& job = job_;
  const std::size_t begin = next % kChunks * job.chunk;
  job.run(job.context, begin, std::min(job.bytes, begin + job.chunk));
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void Helpers::help(int number) noexcept {
  TimePoint last = Clock::now();
  for (bool sleeps = false; !closed_;) {
    if (mayTake(number) && take()) {
      sleeps = false;
      last = Clock::now();
      continue;
    }
    if (!sleeps) {
      for (int i = 0; i < kSpins && !mayTake(number); ++i) cpuRelax();
      ::sched_yield();  // another thread may need this core
      sleeps = Clock::now() - last >= kSpin;
      continue;
    }
    const auto left = kStay - (Clock::now() - last);
    if (left.count() <= 0) break;
    const std::uint32_t seen = jobs_.load();
    sleeping_.fetch_add(1);
    if (!mayTake(number) && !closed_) futexWait(&jobs_, seen, left);
    sleeping_.fetch_sub(1);
  }
  alive_.fetch_and(~(std::uint64_t{1} << number));
}

void Helpers::close() noexcept {
  closed_ = true;
  jobs_.fetch_add(1);
  futexWakeAll(&jobs_);
}

}  // namespace fastcoll
