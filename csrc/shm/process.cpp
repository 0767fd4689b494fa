#include "shm/process.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"
#include "base/weak_registry.hpp"

namespace fastcoll {
namespace {

constexpr int kWatch = 100;  // milliseconds between two calls of a watch

// A connection may be silent for so long, and so many may be silent at once.
constexpr Milliseconds kHelloTimeout{5000};
constexpr std::size_t kCallers = 64;

struct Instance {
  std::mutex mutex;
  std::weak_ptr<LocalProcess> process;
};

void leaveAtExit() {
  auto& it = perProcess<Instance>();
  // try_lock: if a thread was ended inside get(), the exit must not hang.
  std::unique_lock<std::mutex> lock(it.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (auto process = it.process.lock()) process->markCleanLeave();
}

}  // namespace

PeerProcess::PeerProcess(std::shared_ptr<Arena> own)
    : own_(std::move(own)), base_(own_->base()), bytes_(own_->bytes()) {}

PeerProcess::~PeerProcess() {
  if (own_ == nullptr) ::munmap(base_, bytes_);
}

std::string PeerProcess::name() const {
  char host[sizeof(ArenaHeader::host) + 1] = {};
  std::memcpy(host, header().host, sizeof(ArenaHeader::host));
  return concat("pid ", header().pid, ", host ", host);
}

char PeerProcess::state() const {
  const std::uint64_t ours = pidNamespace();
  if (ours == 0 || header().pidNamespace != ours) return '?';  // there this pid is another process
  return processState(static_cast<int>(header().pid));
}

std::shared_ptr<LocalProcess> LocalProcess::get() {
  auto& it = perProcess<Instance>();
  std::lock_guard<std::mutex> lock(it.mutex);
  static const int registered = std::atexit(leaveAtExit);
  (void)registered;
  auto process = it.process.lock();
  if (process == nullptr) {
    process.reset(new LocalProcess);
    it.process = process;
  }
  return process;
}

LocalProcess::LocalProcess() : forkGeneration_(forkGeneration()) {
  address_.nonce = randomNonce128();
  address_.socketName = randomNonce128();
}

LocalProcess::~LocalProcess() {
  if (forkGeneration_ != forkGeneration()) {
    // A child has no keeper thread, so it can neither join nor destroy it.
    if (keeper_.joinable()) keeper_.detach();
    return;
  }
  markCleanLeave();
  if (keeper_.joinable()) {
    stopping_ = true;
    wakeKeeper();
    keeper_.join();
  }
}

bool LocalProcess::started() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return listener_.get() >= 0;
}

void LocalProcess::start(std::size_t arenaBytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (listener_.get() >= 0) return;
  if (!keeper_.joinable()) startKeeper(arenaBytes);
  listener_ = listenAt(address_.socketName);
  listening_ = listener_.get();
  wakeKeeper();
}

void LocalProcess::wakeKeeper() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wakeEvent_.get(), &one, sizeof one);
}

void LocalProcess::watch(const void* owner, std::function<bool()> poll) {
  const std::lock_guard<std::mutex> lock(watchMutex_);
  watches_.emplace(owner, std::move(poll));
  wakeKeeper();
}

void LocalProcess::unwatch(const void* owner) {
  const std::lock_guard<std::mutex> lock(watchMutex_);
  watches_.erase(owner);
}

void LocalProcess::startKeeper(std::size_t arenaBytes) {
  if (arena_ == nullptr) arena_ = Arena::create(arenaBytes);
  arena_->header()->nonce = address_.nonce;
  if (wakeEvent_.get() < 0) wakeEvent_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wakeEvent_.get() < 0) {
    throw Error(ErrorKind::Backend, "fastcoll: eventfd failed (", std::strerror(errno),
                "). Raise the limit on open files.");
  }
  // `life` must be set before any peer can map the arena, so the socket opens last.
  keeper_ = startThread([this] { keep(); });
  while (arena_->header()->life.load(std::memory_order_acquire) == 0) ::usleep(20);
  peers_[address_.nonce] = std::make_shared<PeerProcess>(arena_);
}

void LocalProcess::markCleanLeave() noexcept {
  if (arena_ != nullptr && forkGeneration_ == forkGeneration()) {
    arena_->header()->bye.store(1, std::memory_order_release);
  }
}

void LocalProcess::keep() {
  // The robust list belongs to this thread alone. However the thread ends, the kernel walks the
  // list before it frees the address space, and marks `life` in shared memory. The list node stays
  // in private memory; futex_offset leads from it to `life`.
  robust_list node{};
  robust_list_head head{};
  auto& life = arena_->header()->life;
  head.list.next = &node;
  node.next = &head.list;
  head.futex_offset =
      static_cast<long>(reinterpret_cast<char*>(&life) - reinterpret_cast<char*>(&node));
  head.list_op_pending = nullptr;
  const long registered = ::syscall(SYS_set_robust_list, &head, sizeof head);
  if (registered != 0) {
    log(LogLevel::Warn,
        "the kernel refuses robust futexes, so the death of a rank is reported only after its "
        "timeout. Allow set_robust_list in the container's seccomp profile.");
  }
  life.store(static_cast<std::uint32_t>(::syscall(SYS_gettid)), std::memory_order_release);
  ::pthread_setname_np(::pthread_self(), "fastcoll-keeper");

  int listener = -1;  // once there is one
  Callers callers;
  for (bool watching = false;;) {
    pollfd waiting[2 + kCallers] = {{wakeEvent_.get(), POLLIN, 0},
                                    {callers.size() < kCallers ? listener : -1, POLLIN, 0}};
    for (std::size_t i = 0; i < callers.size(); ++i) {
      waiting[2 + i] = {callers[i].connection.get(), POLLIN, 0};
    }
    if (::poll(waiting, 2 + callers.size(), watching || !callers.empty() ? kWatch : -1) < 0) {
      if (stopping_) break;
      ::usleep(10000);  // out of memory, or a debugger's interruption
      continue;
    }
    if ((waiting[0].revents & POLLIN) != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto got = ::read(wakeEvent_.get(), &count, sizeof count);
      if (stopping_) break;
      listener = listening_;
    }
    {
      const std::lock_guard<std::mutex> lock(watchMutex_);
      std::erase_if(watches_, [](const auto& watch) { return !watch.second(); });
      watching = !watches_.empty();
    }
    serve(callers, waiting + 2);
    if ((waiting[1].revents & POLLIN) != 0) {
      Descriptor connection(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      if (connection.get() < 0) {
        // Out of descriptors: the peer retries; do not spin meanwhile.
        if (errno == EMFILE || errno == ENFILE) ::usleep(10000);
      } else if (isOfThisUser(connection.get())) {  // others must take no place among the callers
        callers.push_back({std::move(connection), Clock::now() + kHelloTimeout});
      }
    }
  }
  // The list ends with this frame. At the thread's end the kernel would follow what is there then,
  // and mark any word of private memory that happens to hold this thread's number.
  ::syscall(SYS_set_robust_list, nullptr, sizeof head);
}

/// Answers those that have sent something, and closes their connections and those silent too long.
void LocalProcess::serve(Callers& callers, const pollfd* polled) {
  std::erase_if(callers, [&](const Caller& one) {
    const bool sent = (polled++)->revents != 0;
    if (!sent && Clock::now() < one.until) return false;
    answer(one.connection.get());
    return true;
  });
}

/// Sends this process's arena to the process that the receiver's nonce names.
bool LocalProcess::greet(int connection, const Nonce128& receiver) const {
  const Hello hello{kArenaMagic,    kAbiVersion, sizeof(Hello),
                    address_.nonce, receiver,    arena_->bytes()};
  return sendHello(connection, hello, arena_->descriptor());
}

void LocalProcess::answer(int connection) {
  try {
    Hello hello;
    Descriptor memory;
    const std::string problem = receiveHello(connection, hello, memory);
    if (!problem.empty()) {
      log(LogLevel::Info, "refused a connection: ", problem);
      return;
    }
    if (hello.receiver != address_.nonce) return;  // meant for an earlier owner of the name
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      adopt(hello.sender, memory, hello.arenaBytes);
    }
    greet(connection, hello.sender);
  } catch (const std::exception& error) {
    log(LogLevel::Warn, "a peer could not be connected: ", error.what());
  }
}

/// Maps a peer's memory, unless it is mapped already. Call it under the lock.
std::shared_ptr<PeerProcess> LocalProcess::adopt(const Nonce128& nonce, const Descriptor& memory,
                                                 std::uint64_t bytes) {
  if (auto known = peers_.find(nonce); known != peers_.end()) return known->second;
  void* mapped = mapShared(memory.get(), bytes);
  if (mapped == MAP_FAILED) {
    throw Error(ErrorKind::Network, "fastcoll: cannot map the shared memory of a peer (",
                std::strerror(errno), ", ", bytes,
                " bytes). Raise the address-space limit (ulimit -v), or "
                "set FASTCOLL_SHARED_MEMORY=off.");
  }
  ::madvise(mapped, bytes, MADV_DONTDUMP);
  auto peer = std::make_shared<PeerProcess>(static_cast<std::uint8_t*>(mapped), bytes);
  // This proves that the memory is shared with that very process, whatever the host names are.
  if (peer->header().magic != kArenaMagic || peer->header().nonce != nonce) {
    throw Error(ErrorKind::Network, "fastcoll: the memory that a peer sent is not that peer's");
  }
  return peers_[nonce] = std::move(peer);
}

std::shared_ptr<PeerProcess> LocalProcess::connect(const ProcessAddress& address) {
  const std::lock_guard<std::mutex> lock(mutex_);  // no call below waits
  if (auto known = peers_.find(address.nonce); known != peers_.end()) return known->second;
  auto asked = unanswered_.find(address.nonce);
  if (asked == unanswered_.end()) {
    Descriptor connection = connectTo(address.socketName);
    if (connection.get() < 0 || !greet(connection.get(), address.nonce)) return nullptr;
    asked = unanswered_.emplace(address.nonce, std::move(connection)).first;
  }
  pollfd waiting{asked->second.get(), POLLIN, 0};
  if (::poll(&waiting, 1, 0) <= 0) return nullptr;
  const Descriptor connection = std::move(asked->second);
  unanswered_.erase(asked);
  // The peer closed without an answer: the name is stale, or the peer is exiting.
  if (char byte = 0; ::recv(connection.get(), &byte, 1, MSG_PEEK) == 0) return nullptr;
  Hello reply;
  Descriptor memory;
  const std::string problem = receiveHello(connection.get(), reply, memory);
  if (!problem.empty()) throw Error(ErrorKind::Network, "fastcoll: a peer sent " + problem);
  if (reply.sender != address.nonce || reply.receiver != address_.nonce) return nullptr;
  return adopt(address.nonce, memory, reply.arenaBytes);
}

void LocalProcess::hold(std::uint64_t offset, std::function<bool()> ended) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_[offset] = std::move(ended);
}

void LocalProcess::retireHeld() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(held_, [this](auto& held) {
    const bool over = held.second();
    if (over) arena_->retire(held.first);
    return over;
  });
}

void LocalProcess::prune() {
  retireHeld();  // before the peers, because held memory refers to some of them
  std::lock_guard<std::mutex> lock(mutex_);
  unanswered_.clear();  // a group that still waits connects anew
  std::erase_if(peers_, [this](const auto& peer) {
    return peer.second.use_count() == 1 && peer.first != address_.nonce;
  });
}

}  // namespace fastcoll
