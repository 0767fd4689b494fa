// The only thread of the trace, started if the settings request a dump on a signal or at a fault. A
// signal handler may do very little, so ours writes into an eventfd and this thread does the rest.
// It runs even if the main thread hangs or another thread holds the interpreter.
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"
#include "base/weak_registry.hpp"
#include "trace/recorder.hpp"

namespace fastcoll::trace {
namespace {

constexpr int kPollMillis = 100;
constexpr std::uint64_t kDump = 1;
constexpr std::uint64_t kEnd = std::uint64_t{1} << 32;

// Read by the signal handler.
std::atomic<int> doorbell{-1};
std::atomic<int> owner{0};  // a forked child inherits the handler, and the parent's eventfd
struct sigaction before;

std::atomic<void (*)()> poller{nullptr};

struct Watching {
  std::mutex mutex;
  std::thread thread;
};

Watching& watching() {
  static auto* it = new PerProcess<Watching>;
  return it->get();
}

void notify(std::uint64_t what) {
  [[maybe_unused]] const auto written =
      ::write(doorbell.load(std::memory_order_relaxed), &what, sizeof what);
}

void onSignal(int number, siginfo_t* info, void* context) {
  const int kept = errno;
  if (owner.load(std::memory_order_relaxed) == ::getpid()) notify(kDump);
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  }
  errno = kept;
}

void watch(bool polls) {
  ::pthread_setname_np(::pthread_self(), "fastcoll-trace");
  pollfd waits{doorbell.load(), POLLIN, 0};
  for (;;) {
    const int found = ::poll(&waits, 1, polls ? kPollMillis : -1);
    if (found < 0 && errno != EINTR) return;
    std::uint64_t events = 0;
    if (found > 0 && ::read(waits.fd, &events, sizeof events) != sizeof events) events = 0;
    if (events % kEnd != 0) dumpByItself("signal");
    if (const auto poll = poller.load(); polls && poll != nullptr) poll();
    if (events >= kEnd) return;
  }
}

}  // namespace

int signalOf(const std::string& name) {
  if (name == "USR1") return SIGUSR1;
  if (name == "USR2") return SIGUSR2;
  if (name == "HUP") return SIGHUP;
  return name == "QUIT" ? SIGQUIT : 0;
}

void setPoll(void (*poll)()) {
  poller.store(poll);
}

void startWatcher(Recorder& recorder) {
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    log(LogLevel::Warn,
        "no eventfd could be made for the trace, so a signal or a fault of another rank writes no "
        "dump. Raise the limit on open files.");
    return;
  }
  doorbell.store(fd);
  owner.store(::getpid());
  const bool polls = !recorder.dumpPrefix.empty();
  try {
    watching().thread = startThread([polls] { watch(polls); });
  } catch (const std::exception&) {
    ::close(fd);
    doorbell.store(-1);
    log(LogLevel::Warn,
        "no thread could be started for the trace, so a signal or a fault of another rank "
        "writes no dump",
        kMoreThreads);
    return;
  }
  if (recorder.signal == 0) return;
  struct sigaction action{};
  action.sa_sigaction = onSignal;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  struct sigaction now{};
  ::sigaction(recorder.signal, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == onSignal) return;  // inherited
  before = now;
  ::sigaction(recorder.signal, &action, nullptr);
}

void stopWatching() noexcept {
  Watching& it = watching();
  std::thread ends;
  {
    const std::lock_guard<std::mutex> lock(it.mutex);
    ends.swap(it.thread);
  }
  if (!ends.joinable()) return;
  notify(kEnd);
  ends.join();
}

}  // namespace fastcoll::trace
