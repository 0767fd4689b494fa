#include "torch/host_peers.hpp"

#include <vector>

#include "base/log.hpp"
#include "base/topology.hpp"
#include "cpu/cpu_engine.hpp"
#include "shm/call_board.hpp"

namespace fastcoll {
namespace {

// A call that an ended rank has made too may still end here. And the fault of a rank that has left
// for one may still come through the store.
constexpr Milliseconds kAfterEnd{1200};
// Between two reads of the states of processes that a call waits for.
constexpr Milliseconds kStates{500};

}  // namespace

void HostPeers::meet(Milliseconds timeout) {
  const auto engine = engine_.lock();
  if (engine == nullptr) return;
  const std::vector<int> here = engine->meet(timeout);
  if (here.size() == 1) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (board_ == nullptr) board_ = std::make_shared<CallBoard>(*engine->memory(), here);
}

void HostPeers::meet(int peer, Milliseconds timeout) {
  if (const auto engine = engine_.lock()) engine->meet(peer, timeout);
}

std::uint64_t HostPeers::post(const Signature& signature, std::uint64_t others) {
  const auto memory = this->memory();  // which the board refers to
  const auto board = this->board();
  return memory == nullptr || board == nullptr ? 0 : board->post(signature, others);
}

bool HostPeers::aborted() {
  const auto memory = this->memory();
  return memory != nullptr && memory->aborted();
}

Fault HostPeers::recorded() {
  const auto memory = this->memory();
  return memory != nullptr ? memory->recorded() : Fault{};
}

void HostPeers::record(const Fault& fault) {
  if (const auto memory = this->memory()) memory->abort(fault.kind, fault.text);
}

std::optional<HostFault> HostPeers::look(const UnderWay& call) {
  const auto memory = this->memory();
  if (memory == nullptr) return std::nullopt;
  const auto now = Clock::now();
  const std::lock_guard<std::mutex> lock(looking_);
  for (const int peer : memory->boundPeers()) {
    if (isLost(*memory, peer, call, now)) {
      return HostFault{{ErrorKind::Backend, memory->causeOfSilence(peer, call.text)}};
    }
  }
  const auto board = this->board();
  if (board == nullptr) return std::nullopt;
  if (auto text = board->mismatch()) {
    return HostFault{{ErrorKind::Backend, std::move(*text)}, true};
  }
  warnOfStopped(*memory, *board, call, now);
  return std::nullopt;
}

std::string HostPeers::late(std::uint64_t number) {
  const auto memory = this->memory();
  const auto board = this->board();
  if (memory == nullptr || board == nullptr || number == 0) return "";
  std::string text;
  for (const int peer : memory->boundPeers()) {
    if (board->countOf(peer) >= number) continue;
    const std::string last = board->lastOf(peer);
    const char state = memory->process(peer).state();
    text += concat(text.empty() ? "; not arrived: " : "; ", memory->memberName(peer),
                   last.empty() ? ", no call yet" : ", last call " + last, ", state ", state,
                   isStopped(state) ? " (stopped)" : "");
  }
  return text;
}

std::shared_ptr<GroupMemory> HostPeers::memory() const {
  const auto engine = engine_.lock();
  return {engine, engine == nullptr ? nullptr : engine->memory()};
}
std::shared_ptr<CallBoard> HostPeers::board() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return board_;
}

bool HostPeers::isLost(const GroupMemory& memory, int peer, const UnderWay& call, TimePoint now) {
  const bool dead = memory.isDead(peer);
  const bool left = memory.hasLeft(peer);
  if (!dead && !left) return false;
  const auto board = this->board();
  const bool without = board != nullptr && call.number > board->countOf(peer);
  const bool late = now >= seen_.try_emplace(peer, now).first->second + kAfterEnd;
  return left ? without && late : call.text.empty() || without || late;
}

void HostPeers::warnOfStopped(const GroupMemory& memory, const CallBoard& board,
                              const UnderWay& call, TimePoint now) {
  if (call.text.empty() || now < call.since + kStates || now < states_ + kStates) return;
  states_ = now;
  for (const int peer : memory.boundPeers()) {
    if (!isStopped(memory.process(peer).state())) {
      stopped_.erase(peer);
      continue;
    }
    if (!stopped_.insert(peer).second) continue;
    const std::string last = board.lastOf(peer);
    log(LogLevel::Warn, concat("group '", memory.identity().name, "', rank ", memory.rank(), "/",
                               memory.size(), ": ", call.text, " waits while ",
                               memory.memberName(peer), " is stopped by a signal or a debugger",
                               last.empty() ? "" : ", its last call is " + last));
  }
}

}  // namespace fastcoll
