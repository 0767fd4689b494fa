// Threads that help the one that runs a collective, on cores of its rank that are idle.
//
// A long copy or sum of that thread is cut into chunks, which it and its helpers take in turns:
//
//   caller:  write the job;  next = (job number, chunks, 0);  take chunks;  wait for done == chunks
//   helper:  read next;  next: one more is taken;  run that chunk;  done += 1
//
// Elements do not mix, so no bit depends on who took a chunk. A helper that has not yet woken takes
// none, so no thread waits for it. A helper takes a chunk by a compare and exchange of the word
// that has the job's number, so it never takes one of a job that has ended, and reads the job only
// after it has taken a chunk. `done` (release, acquire) orders its writes before the caller's next
// store.
//
// Whether help pays is measured, for jobs of one kind and similar length: other processes may use
// the cores, and a short job takes less time than the hand-over of its lines between caches.
//
// Helpers stay on the memory node (NUMA) of the thread that asked for them, where its memory is.
//
// A helper spins between the jobs of a collective. It sleeps after 300 us without one, and goes
// back to the pool of threads after 20 ms. No wake-up is lost: see shm/wait.hpp.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fastcoll {

class Helpers : public std::enable_shared_from_this<Helpers> {
 public:
  static constexpr int kMost = 64;

  /// While it lives, inChunks() on this thread uses up to so many threads, this one included.
  /// `always`: without measuring whether that pays. One at a time for each object.
  class Lent {
   public:
    Lent(Helpers& helpers, int threads, bool always = false) noexcept;
    ~Lent();
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;

   private:
    Helpers* const before_;
  };

  /// Bytes. The ends of all chunks but the last are multiples of it.
  static constexpr std::size_t kUnit = 4096;
  /// Calls part(begin, end) for chunks of [0, bytes) on this thread and its helpers. `part` must
  /// not throw.
  template <typename Part>
  static void inChunks(std::size_t bytes, Part part) {
    if (bytes < 2 * kLeastChunk || current_ == nullptr) return part(std::size_t{0}, bytes);
    const auto run = [](void* context, std::size_t begin, std::size_t end) {
      (*static_cast<Part*>(context))(begin, end);
    };
    current_->run(Job{run, &part, bytes, 0});
  }

  /// Ends the threads as soon as they are idle. The caller runs later jobs alone.
  void close() noexcept;

 private:
  /// A chunk of fewer bytes takes little longer than the hand-over of its lines.
  static constexpr std::size_t kLeastChunk = 16 * 1024;

  struct Job {
    void (*run)(void* context, std::size_t begin, std::size_t end);
    void* context;
    std::size_t bytes;
    std::size_t chunk;
  };
  // The word `next_`: the job's number, its chunks, and how many of them are taken.
  static constexpr std::uint64_t kChunks = std::uint64_t{1} << 16;
  static constexpr std::uint64_t kNumber = std::uint64_t{1} << 32;
  static bool isOpen(std::uint64_t next) { return next % kChunks < next / kChunks % kChunks; }

  /// Chooses for jobs of one kind and similar length, by their costs in nanoseconds a byte.
  struct Choice {
    void (*run)(void*, std::size_t, std::size_t) = nullptr;
    int length = 0;      // as a power of two
    bool usual = false;  // with help
    int tries = 0;       // jobs left that are run in the other way
    int jobs = 0;        // since the last try
    int cycle = 16;      // jobs between two tries; more while tries change nothing
    double cost = 0;     // in the usual way
    double tried = 0;    // in the other way, in the present try

    bool helps() const { return usual != (tries > 0); }
    void add(double spent);
  };

  void run(Job job) noexcept;
  Choice& choiceOf(const Job& job);
  void share(Job job) noexcept;
  bool take() noexcept;
  void help(int number) noexcept;
  bool mayTake(int number) const {
    return number < threads_.load(std::memory_order_relaxed) &&
           isOpen(next_.load(std::memory_order_acquire));
  }

  static thread_local Helpers* current_;

  alignas(64) std::atomic<std::uint64_t> next_{0};
  Job job_{};
  alignas(64) std::atomic<std::uint32_t> done_{0};
  std::atomic<int> threads_{1};          // helpers from this number on take nothing
  std::atomic<std::uint32_t> jobs_{0};   // helpers sleep on it
  std::atomic<int> sleeping_{0};         // helpers that sleep, or are about to
  std::atomic<std::uint64_t> alive_{0};  // a bit for each helper; the caller is number 0
  std::atomic<bool> closed_{false};
  // Of the caller alone.
  bool always_ = false;
  std::array<Choice, 64> choices_{};  // by kind and length
};

}  // namespace fastcoll
