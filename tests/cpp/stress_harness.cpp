#include "stress_harness.hpp"

#include <dirent.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace stress {

int effort = 1;

int often(int repetitions) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kFewer = 3;
#else
  constexpr int kFewer = 1;
#endif
  return std::max(1, repetitions * effort / kFewer);
}

namespace {

/// Key that is set when a rank has failed: it ends all other ranks' waits, so the first cause is
/// reported soon.
constexpr const char* kFailed = "failed";

/// Where ranks that are threads meet.
class MemoryStore : public KeyValueStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
  }
  bool tryGet(const std::string& key, std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (values_.count(kFailed) != 0) throw Error(ErrorKind::Network, "another rank has failed");
    const auto found = values_.find(key);
    if (found == values_.end()) return false;
    value = found->second;
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

/// Where processes meet. One file for each key; a rename makes each value appear atomically.
class FolderStore : public KeyValueStore {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const std::string& value) override {
    static std::atomic<int> writes{0};
    const std::string fresh = concat(folder_, "/.", ::getpid(), ".", ++writes);
    std::ofstream(fresh, std::ios::binary) << value;
    std::filesystem::rename(fresh, path(key));
  }
  bool tryGet(const std::string& key, std::string& value) override {
    if (::access(path(kFailed).c_str(), F_OK) == 0) {
      throw Error(ErrorKind::Network, "another rank has failed");
    }
    std::ifstream file(path(key), std::ios::binary);
    if (!file) return false;
    std::ostringstream text;
    text << file.rdbuf();
    value = text.str();
    return true;
  }

 private:
  std::string path(std::string key) const {
    for (char& c : key) c = c == '/' ? '=' : c;
    return folder_ + "/" + key;
  }
  const std::string folder_;
};

class PrefixStore : public KeyValueStore {
 public:
  PrefixStore(std::shared_ptr<KeyValueStore> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(prefix_ + key, value);
  }
  bool tryGet(const std::string& key, std::string& value) override {
    return store_->tryGet(prefix_ + key, value);
  }

 private:
  std::shared_ptr<KeyValueStore> store_;
  const std::string prefix_;
};

int entriesOf(const char* folder) {
  int count = 0;
  if (DIR* open = ::opendir(folder)) {
    while (const dirent* entry = ::readdir(open)) count += entry->d_name[0] != '.';
    ::closedir(open);
  }
  return count;
}

struct Watch {
  std::mutex mutex;
  std::string name;
  TimePoint end = TimePoint::max();
};
Watch& watched() {
  static auto* it = new Watch;
  return *it;
}

}  // namespace

Engine Rank::group(const std::string& name, const GroupOptions& options) const {
  EngineConfig config;
  config.name = name;
  config.rank = rank;
  config.size = size;
  config.settings.ringBytes = options.ringBytes;
  config.tuning = options.tuning;
  config.settings.spinMicros = options.spinMicros;
  config.settings.arenaBytes = std::int64_t{1} << 30;
  config.settings.sharedMemory = options.sharedMemory;
  config.settings.hostId = options.hostId;
  config.settings.digest = options.digest;
  config.settings.threads = options.threads;
  config.version = "stress";
  return std::make_shared<CpuEngine>(
      config, std::make_unique<PrefixStore>(store_, "group/" + name + "/"), options.network);
}

Engine Rank::usedGroup(const std::string& name, const GroupOptions& options) {
  const Engine engine = group(name, options);
  runChecked(*this, *engine, sum(10));
  sync();
  return engine;
}

std::string Rank::read(const std::string& key) const {
  std::string value;
  const auto end = Clock::now() + Milliseconds(60000);
  while (!store_->tryGet(key, value)) {
    REQUIRE(Clock::now() < end, "rank ", rank, " waits for ", key);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return value;
}

void Rank::sync() {
  const std::string base = concat("sync/", syncs_++, "/");
  note(base + std::to_string(rank), "here");
  for (int peer = 0; peer < size; ++peer) read(base + std::to_string(peer));
}

void together(int threads, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> problems(static_cast<std::size_t>(threads));
  std::vector<std::jthread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        problems[static_cast<std::size_t>(i)] = std::current_exception();
      }
    });
  }
  running.clear();  // joins
  for (const auto& problem : problems) {
    if (problem) std::rethrow_exception(problem);
  }
}

void runAsThreads(int ranks, const Body& body) {
  const auto store = std::make_shared<MemoryStore>();
  std::mutex mutex;
  std::string problems;
  together(ranks, [&](int i) {
    try {
      Rank rank(store, i, ranks, false);
      body(rank);
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(mutex);
      problems += concat("\n  rank ", i, ": ", error.what());
      store->set(kFailed, "yes");
    }
  });
  if (!problems.empty()) throw std::runtime_error(problems);
}

void runAsProcesses(int ranks, const Body& body, int dies) {
  char folder[] = "/tmp/fastcoll-stress-XXXXXX";
  REQUIRE(::mkdtemp(folder) != nullptr);
  const auto store = std::make_shared<FolderStore>(folder);
  std::vector<pid_t> children;
  for (int i = 0; i < ranks; ++i) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    int status = 0;
    try {
      Rank rank(store, i, ranks, true);
      body(rank);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", i, error.what());
      store->set(kFailed, "yes");
      status = 1;
    }
    std::exit(status);  // runs the leak check and fastcoll's exit handlers
  }
  std::string problems;
  for (int i = 0; i < ranks; ++i) {
    int status = 0;
    ::waitpid(children[static_cast<std::size_t>(i)], &status, 0);
    const bool fine = i == dies ? WIFSIGNALED(status) : status == 0;
    if (!fine) problems += concat("\n  rank ", i, " ended with status ", status);
  }
  std::filesystem::remove_all(folder);
  if (!problems.empty()) throw std::runtime_error(problems);
}

void watch(const std::string& name, int seconds) {
  Watch& it = watched();
  std::lock_guard<std::mutex> lock(it.mutex);
  it.name = name;
  it.end = Clock::now() + Milliseconds(1000 * seconds);
  static std::once_flag once;
  std::call_once(once, [&it] {
    std::thread([&it] {
      for (;;) {
        std::this_thread::sleep_for(Milliseconds(200));
        std::lock_guard<std::mutex> guard(it.mutex);
        if (Clock::now() < it.end) continue;
        std::fprintf(stderr, "HANGS: %s\n", it.name.c_str());
        ::abort();
      }
    }).detach();
  });
}

std::string requireFault(const std::vector<std::string>& texts, const std::function<void()>& body) {
  std::string text;
  try {
    body();
  } catch (const Error& error) {
    text = error.what();
  }
  REQUIRE(!text.empty(), "expected a fault with '", texts[0], "', got success");
  bool found = false;
  for (const auto& wanted : texts) found = found || text.find(wanted) != std::string::npos;
  REQUIRE(found, "expected '", texts[0], "', got: ", text);
  return text;
}

int openDescriptors() {
  return entriesOf("/proc/self/fd");
}
int runningThreads() {
  return entriesOf("/proc/self/task");
}

void loiter(Random& random, int mostMicros) {
  if (chance(random, 2)) return;
  std::this_thread::sleep_for(
      std::chrono::microseconds(drawBelow(random, static_cast<std::size_t>(mostMicros))));
}

}  // namespace stress
