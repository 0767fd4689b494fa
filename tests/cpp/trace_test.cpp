// The trace under many writers: a small ring that wraps all the time, records that are ended by
// other threads than those that made them, and concurrent readers. Every record that a reader gets
// must be a whole record of one writer.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "trace/ring.hpp"
#include "trace/trace.hpp"

using namespace fastcoll;
using trace::Record;
using trace::RecordId;
using trace::Ring;

namespace {

void expect(bool fine, const char* what) {
  if (fine) return;
  std::fprintf(stderr, "trace_test: %s\n", what);
  std::exit(1);
}

Record made(std::uint64_t seq) {
  Record record;
  record.group = 1;
  record.peer = static_cast<std::int64_t>(3 * seq);
  record.created = static_cast<std::int64_t>(7 * seq);
  const std::int64_t sizes[] = {static_cast<std::int64_t>(seq), 2, 5};
  for (std::uint64_t i = 0; i < seq % 5; ++i) record.shapes.add(i > 1, DType::Float32, sizes, 3);
  return record;
}

void check(const Record& record) {
  const std::uint64_t seq = record.seq;
  expect(record.peer == static_cast<std::int64_t>(3 * seq), "a record has another's peer");
  expect(record.created == static_cast<std::int64_t>(7 * seq), "a record has another's time");
  expect(record.shapes.used == 4 * (seq % 5), "a record has another's shapes");
  for (std::uint64_t i = 0; i < seq % 5; ++i) {
    expect(record.shapes.words[4 * i + 1] == seq, "a record has another's sizes");
  }
  expect(record.ended == 0 || record.ended == static_cast<std::int64_t>(record.id),
         "a record has another's end");
}

void overtake(std::size_t size) {
  constexpr int kWriters = 4;
  constexpr std::uint64_t kCalls = 20000;
  Ring ring(size);
  std::atomic<bool> stop{false};
  std::atomic<RecordId> latest{0};
  std::vector<std::thread> others;
  for (int reader = 0; reader < 2; ++reader) {
    others.emplace_back([&] {
      while (!stop.load()) {
        const auto records = ring.read();
        expect(records.size() <= size, "more records than the ring holds");
        for (const Record& record : records) check(record);
      }
    });
  }
  others.emplace_back([&] {  // ends other threads' records, often too late
    while (!stop.load()) {
      if (const RecordId id = latest.load()) {
        ring.end(id, trace::State::Completed, static_cast<std::int64_t>(id));
      }
    }
  });
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      for (std::uint64_t i = 1; i <= kCalls; ++i) {
        const std::uint64_t seq = i * kWriters + static_cast<std::uint64_t>(writer);
        const RecordId id = ring.add(made(seq), seq, i % 2 == 0);
        if (id == 0) continue;
        latest.store(id);
        ring.start(id, 1);
      }
    });
  }
  for (auto& writer : writers) writer.join();
  stop.store(true);
  for (auto& other : others) other.join();
  expect(ring.last() == kWriters * kCalls, "records were not counted");
  // Any of those writers may have dropped its record because its slot was busy; a single writer
  // never does.
  const RecordId last = ring.add(made(1), 1, true);
  expect(last == kWriters * kCalls + 1, "a record was refused though nobody wrote");
  const auto records = ring.read();
  expect(!records.empty() && records.back().id == last, "the last record is not there");
  for (const Record& record : records) check(record);
}

void dumpWhileCalling() {
  Settings settings;
  settings.traceSize = 32;
  trace::begin(settings, "test");
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop.load()) expect(!trace::dump("test").empty(), "an empty dump");
  });
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([] {
      for (int round = 0; round < 50; ++round) {
        trace::Group group;
        group.name = "g";
        group.ranks = {0, 1};
        const std::uint32_t number = trace::addGroup(group);
        for (std::uint64_t seq = 1; seq < 20; ++seq) {
          Record draft;
          draft.group = number;
          trace::describe(draft);
          const RecordId id = trace::record(draft, seq, true);
          seq % 7 == 0 ? trace::fail(id, "a fault \xff") : trace::complete(id);
        }
        trace::endGroup(number);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  stop.store(true);
  reader.join();
}

}  // namespace

int main() {
  for (const std::size_t size : {1, 2, 5, 64}) overtake(size);
  dumpWhileCalling();
  std::puts("trace_test: no faults");
  return 0;
}
