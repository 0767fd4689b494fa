#include "network/gloo.hpp"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <list>
#include <thread>
#include <utility>

#include "base/thread.hpp"
#include "base/weak_registry.hpp"
#include "network/polling_store.hpp"

namespace fastcoll {
namespace {

constexpr Milliseconds kTick{10};
// How often a long wait checks its connection's sentinel.
constexpr Milliseconds kCheck{200};
// Ticks without a wait after which the alarm's thread sleeps.
constexpr int kIdleTicks = 20;
// A time-out of Gloo's own closes connections, so the alarm ends waits instead.
constexpr Milliseconds kNever = std::chrono::hours(24 * 365);

// Tag of a receive that no send matches; see Sentinel.
constexpr int kSentinelTag = std::numeric_limits<int>::max();

// Time for Gloo to connect two processes that have each other's addresses. Nothing else ends that
// wait.
constexpr Milliseconds kGlooConnects{20000};

// Open files that Gloo needs for a connection: one for each direction, and those to listen, to poll
// and to read the store.
constexpr int kDescriptors = 2 + 6;

/// Gloo aborts the process, or lets its peer wait, if it runs out of descriptors. So check first.
void requireDescriptors() {
  int held[kDescriptors];
  int count = 0;
  while (count < kDescriptors && (held[count] = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0) {
    ++count;
  }
  const int error = errno;
  for (int i = 0; i < count; ++i) ::close(held[i]);
  if (count == kDescriptors) return;
  throw CannotConnect(ErrorKind::Backend, "this process can open ", count,
                      " more files, and a connection by Gloo needs ", kDescriptors, " (",
                      std::strerror(error),
                      "). Raise the limit on open files (ulimit -n) on this rank.");
}

at::Tensor view(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

/// Throws Gloo's error text, without its place in the source and its advice.
[[noreturn]] void lost(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  if (const auto place = text.find("] "); text.rfind("[", 0) == 0 && place != std::string::npos) {
    text = text.substr(place + 2);
  }
  throw ConnectionLost(ErrorKind::Backend, "Gloo: " + text.substr(0, text.find(". ")));
}

}  // namespace

/// Ends waits that last too long. Gloo's works cannot be polled, and a time-out of a wait closes
/// the connection. But another thread can abort a wait, which may then begin again.
class GlooNetwork::Alarm {
 public:
  ~Alarm() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  /// Waits for the work until `until`, plus a tick at most; false if the alarm ended the wait.
  bool wait(c10d::Work& work, TimePoint until) {
    std::list<Waiter>::iterator place;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!thread_.joinable()) thread_ = startThread([this] { serve(); });
      place = waiters_.insert(waiters_.end(), {&work, until});
      if (asleep_) changed_.notify_all();
    }
    const auto leave = c10::make_scope_exit([&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiters_.erase(place);
    });
    return work.wait();
  }

 private:
  struct Waiter {
    c10d::Work* work;
    TimePoint until;
  };

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int idle = 0; !stopping_;) {
      idle = waiters_.empty() ? idle + 1 : 0;
      if (idle > kIdleTicks) {
        asleep_ = true;
        changed_.wait(lock, [this] { return stopping_ || !waiters_.empty(); });
        asleep_ = false;
        idle = 0;
      } else {
        changed_.wait_for(lock, kTick, [this] { return stopping_; });
      }
      const auto now = Clock::now();
      // Abort again at each tick: the wait may not have begun before.
      for (const Waiter& waiter : waiters_) {
        if (now >= waiter.until) waiter.work->abort();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Waiter> waiters_;
  std::thread thread_;
  bool asleep_ = false;
  bool stopping_ = false;
};

/// A receive that no send matches. When a connection breaks, Gloo fails its receives, except one
/// whose message has begun to arrive. The sentinel fails in that case, too.
struct GlooNetwork::Sentinel {
  std::mutex mutex;
  std::uint8_t byte = 0;
  c10::intrusive_ptr<c10d::Work> work;
};

class GlooNetwork::GlooTransfer : public Transfer {
 public:
  GlooTransfer(std::shared_ptr<Alarm> alarm, std::shared_ptr<Sentinel> sentinel,
               c10::intrusive_ptr<c10d::Work> work)
      : alarm_(std::move(alarm)), sentinel_(std::move(sentinel)), work_(std::move(work)) {}

  bool wait(TimePoint until) override {
    try {
      if (alarm_->wait(*work_, until)) return true;
      // The check takes a tick, in which arriving data is not detected. So it is made every kCheck
      // only.
      const auto now = Clock::now();
      if (checked_ == TimePoint{}) checked_ = now;
      const std::unique_lock<std::mutex> lock(sentinel_->mutex, std::try_to_lock);
      if (now - checked_ >= kCheck && lock.owns_lock()) {
        checked_ = now;
        try {
          alarm_->wait(*sentinel_->work, now);
        } catch (const std::exception&) {
          // A message that arrived whole before the connection broke counts.
          if (alarm_->wait(*work_, now)) return true;
          throw;
        }
      }
      return false;
    } catch (const std::exception& error) {
      lost(error);
    }
  }

 private:
  std::shared_ptr<Alarm> alarm_;
  std::shared_ptr<Sentinel> sentinel_;
  c10::intrusive_ptr<c10d::Work> work_;
  TimePoint checked_{};  // when the sentinel was checked last
};

class GlooNetwork::GlooConnection : public Connection {
 public:
  GlooConnection(std::shared_ptr<Alarm> alarm, c10::intrusive_ptr<c10d::Backend> out,
                 c10::intrusive_ptr<c10d::Backend> in, int peer)
      : alarm_(std::move(alarm)),
        sentinel_(std::make_shared<Sentinel>()),
        out_(std::move(out)),
        in_(std::move(in)),
        peer_(peer) {
    std::vector<at::Tensor> memory{view(&sentinel_->byte, 1)};
    sentinel_->work = in_->recv(memory, peer_, kSentinelTag);
  }

  TransferRef send(const void* data, std::size_t bytes, int tag) override {
    return begin([&](std::vector<at::Tensor>& memory) { return out_->send(memory, peer_, tag); },
                 data, bytes);
  }
  TransferRef receive(void* data, std::size_t bytes, int tag) override {
    return begin([&](std::vector<at::Tensor>& memory) { return in_->recv(memory, peer_, tag); },
                 data, bytes);
  }

 private:
  template <typename Start>
  TransferRef begin(Start start, const void* data, std::size_t bytes) {
    try {
      std::vector<at::Tensor> memory{view(data, bytes)};
      return std::make_unique<GlooTransfer>(alarm_, sentinel_, start(memory));
    } catch (const std::exception& error) {
      lost(error);
    }
  }

  std::shared_ptr<Alarm> alarm_;
  std::shared_ptr<Sentinel> sentinel_;
  // Each has a socket for data of one direction. Gloo sends data only after the receiver has
  // reported that its memory is ready. In a socket for both directions that report would wait
  // behind the receiver's own data. Long messages would then go in one direction at a time.
  c10::intrusive_ptr<c10d::Backend> out_, in_;
  const int peer_;
};

struct GlooNetwork::Device {
  Device()
      : sockets([&] {
          requireDescriptors();
          make = factory()();
        }) {}

  static std::function<Maker()>& factory() {
    static auto* factory = new std::function<Maker()>;  // outlives static destructors
    return *factory;
  }

  /// The process's device. A forked child has none of its parent's threads, so it makes its own.
  static std::shared_ptr<Device> get() {
    struct Shared {
      std::mutex mutex;
      std::weak_ptr<Device> device;
    };
    auto& now = perProcess<Shared>();
    const std::lock_guard<std::mutex> lock(now.mutex);
    auto found = now.device.lock();
    if (found == nullptr) now.device = found = std::make_shared<Device>();
    return found;
  }

  Maker make;
  const LoopSockets sockets;
  const std::shared_ptr<Alarm> alarm = std::make_shared<Alarm>();
};

void GlooNetwork::setFactory(std::function<Maker()> factory) {
  Device::factory() = std::move(factory);
}

GlooNetwork::GlooNetwork(NetworkSetup setup) : setup_(std::move(setup)) {}

GlooNetwork::~GlooNetwork() = default;

std::unique_ptr<Connection> GlooNetwork::connect(const std::string& name, bool first,
                                                 Milliseconds timeout,
                                                 const std::function<void()>& check) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (device_ == nullptr) device_ = Device::get();
  const auto device = device_;
  lock.unlock();
  requireDescriptors();
  const auto end = Clock::now() + timeout;
  // A backend keeps the store in which it waits. That may outlive this call and this network.
  const auto during = std::make_shared<const std::function<void()>*>(&check);
  const std::shared_ptr<void> over(nullptr, [during](void*) { *during = nullptr; });
  const auto wait = [stopped = stopped_, during] {
    if (*stopped) throw Error(ErrorKind::Backend, "the group was destroyed");
    if (*during != nullptr) (**during)();
  };
  const auto backend = [&](const char* way) {
    const auto left =
        std::max(std::chrono::ceil<Milliseconds>(end - Clock::now()), Milliseconds{1});
    const auto prefix = "fastcoll/link/" + name + way;
    const auto patient = c10::make_intrusive<PollingStore<decltype(wait)>>(
        setup_.store, prefix + "/decision", left, wait);
    auto made = device->make(c10::make_intrusive<c10d::PrefixStore>(prefix, patient), first ? 0 : 1,
                             2, std::min(left, kGlooConnects));
    patient->throwIfEnded();
    made->setTimeout(kNever);
    return made;
  };
  try {
    const auto before = device->sockets.connected();
    auto there = backend("/there"), back = backend("/back");
    std::vector<int> made;
    for (const int fd : device->sockets.connected()) {
      if (std::ranges::find(before, fd) == before.end()) made.push_back(fd);
    }
    LoopSockets::tune(made, setup_.silence);
    lock.lock();
    sockets_.insert(sockets_.end(), made.begin(), made.end());
    lock.unlock();
    if (!first) std::swap(there, back);
    return std::make_unique<GlooConnection>(device->alarm, std::move(there), std::move(back),
                                            first ? 1 : 0);
  } catch (const std::exception& error) {
    lost(error);
  }
}

void GlooNetwork::drain(TimePoint until) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto device = device_;
  const auto sockets = sockets_;
  lock.unlock();
  if (device != nullptr) device->sockets.drain(sockets, until);
}

}  // namespace fastcoll
