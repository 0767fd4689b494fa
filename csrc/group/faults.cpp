#include "group/faults.hpp"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/utf8.hpp"
#include "base/worker_pool.hpp"

namespace fastcoll {
namespace {

constexpr std::size_t kLongest = 1000;
constexpr int kFailures = 5;  // in a row, after which check() no longer reads the store

// The kinds of fault that other ranks may raise, from Backend on, and their letters. Any other is
// written as Backend: one rank's bad arguments are not theirs.
constexpr std::string_view kLetters = "BTSN";
constexpr int kFirstKind = static_cast<int>(ErrorKind::Backend);
static_assert(static_cast<int>(ErrorKind::Timeout) == kFirstKind + 1 &&
              static_cast<int>(ErrorKind::Store) == kFirstKind + 2 &&
              static_cast<int>(ErrorKind::Network) == kFirstKind + 3);

char letterOf(ErrorKind kind) {
  return kLetters[std::max(0, static_cast<int>(kind) - kFirstKind)];
}

/// The format: a letter for the kind, the time in decimal, a space, the text.
std::optional<Fault> parse(const std::string& value) {
  const auto space = value.find(' ');
  if (space == std::string::npos || space < 2 || space > 20 || space + 1 == value.size()) {
    return std::nullopt;
  }
  const auto kind = kLetters.find(value[0]);
  const std::string time = value.substr(1, space - 1);
  if (kind == std::string::npos || time.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  Fault fault{static_cast<ErrorKind>(kFirstKind + kind), value.substr(space + 1, kLongest),
              std::strtoll(time.c_str(), nullptr, 10)};
  for (char& c : fault.text) {
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = ' ';
  }
  fault.text = validUtf8(std::move(fault.text));
  return fault;
}

}  // namespace

std::int64_t millisSince1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

std::string faultKey(const std::string& hash) {
  return "fastcoll/f/" + hash;
}

std::string faultKey(std::uint64_t nonce) {
  return concat("fastcoll/f/", nonce);
}

std::optional<Fault> readFault(KeyValueStore& store, const std::string& key) {
  std::string value;
  if (!store.tryGet(key, value)) return std::nullopt;
  return parse(value);
}

Fault writeFault(KeyValueStore& store, const std::string& key, const Fault& fault) {
  const std::string mine =
      concat(letterOf(fault.kind), millisSince1970(), ' ', fault.text.substr(0, kLongest));
  return parse(store.setFirst(key, mine)).value_or(fault);
}

// --- on other threads ---------------------------------------------------------------------------

struct ErrorChannel::Shared {
  explicit Shared(std::shared_ptr<KeyValueStore> s) : store(std::move(s)) {}
  const std::shared_ptr<KeyValueStore> store;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Fault> first;
  bool checking = false;
  bool publishing = false;
  int failures = 0;
};

ErrorChannel::ErrorChannel(std::shared_ptr<KeyValueStore> store)
    : shared_(std::make_shared<Shared>(std::move(store))) {}

// Both start their job under the lock that the job takes at its end. If no thread can be started,
// the next call tries again.

Fault ErrorChannel::publish(std::vector<std::string> keys, const Fault& fault,
                            Milliseconds patience) noexcept {
  try {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    // Publish an already known fault, too: some rank may read only this rank's keys.
    const Fault mine = shared_->first.value_or(fault);
    if (keys.empty()) return mine;
    if (!shared_->publishing) {
      runOnWorker([shared = shared_, keys = std::move(keys), mine] {
        std::optional<Fault> first;
        try {
          for (const std::string& key : keys) {
            Fault there = writeFault(*shared->store, key, first.value_or(mine));
            if (!first) first = std::move(there);
          }
        } catch (const std::exception&) {  // without the store each rank detects the fault itself
        }
        const std::lock_guard<std::mutex> again(shared->mutex);
        if (!shared->first) shared->first = first.value_or(mine);
        shared->changed.notify_all();
      });
      shared_->publishing = true;
    }
    shared_->changed.wait_for(lock, patience, [this] { return shared_->first.has_value(); });
    return shared_->first.value_or(fault);
  } catch (const std::exception&) {  // no thread, no memory
    return fault;
  }
}

std::optional<Fault> ErrorChannel::check(std::vector<std::string> keys,
                                         Milliseconds patience) noexcept {
  try {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    if (shared_->first) return shared_->first;
    if (!shared_->checking && shared_->failures < kFailures) {
      runOnWorker([shared = shared_, keys = std::move(keys)] {
        std::optional<Fault> found;
        bool failed = false;
        try {
          for (auto key = keys.begin(); key != keys.end() && !found; ++key) {
            found = readFault(*shared->store, *key);
          }
        } catch (const std::exception&) {
          failed = true;
        }
        const std::lock_guard<std::mutex> again(shared->mutex);
        shared->checking = false;
        shared->failures = failed ? shared->failures + 1 : 0;
        if (found && !shared->first) shared->first = std::move(found);
        shared->changed.notify_all();
      });
      shared_->checking = true;
    }
    shared_->changed.wait_for(lock, patience, [this] { return !shared_->checking; });
    return shared_->first;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace fastcoll
