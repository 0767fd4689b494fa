#include "cpu/hosts/links.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/interrupt.hpp"
#include "shm/wait.hpp"

namespace fastcoll {
namespace {

constexpr int kFrames = 0;  // the tag of frames

/// The tag of data.
int tagOf(Links::StepTag step, std::size_t bytes) {
  constexpr std::size_t kLengths = std::size_t{1} << 29;
  return static_cast<int>(2 * (bytes % kLengths)) + step;
}

// A wait that has lasted this long checks the frames of another host, the next one each time.
constexpr Milliseconds kUnawaited{1000};
// Time for a close notice in flight, when the connection in the other direction breaks first.
constexpr Milliseconds kNotice{100};

}  // namespace

/// Runs `call`. If the connection breaks, the error names the host.
template <typename Call>
auto Links::lost(int host, Call call) {
  try {
    return call();
  } catch (const ConnectionLost& error) {
    throwIfLeft(host);
    throw ConnectionLost(error.kind(), site_,
                         brokeOff(memory_.memberName(hosts_.leader(host)), error.what()));
  }
}

Links::Links(std::shared_ptr<Network> network, const Hosts& hosts, GroupMemory& memory,
             const std::string& id, Milliseconds timeout, Milliseconds grace, GroupFaults& faults)
    : hosts_(hosts),
      memory_(memory),
      room_(std::max(kInlineBytes, 2 * sizeof(std::uint64_t) * hosts.most() * hosts.most())),
      network_(std::move(network)),
      faults_(faults),
      grace_(grace) {
  const int count = hosts.count(), here = hosts.here();
  links_.resize(count);
  for (int step = 1; step < count; ++step) others_.push_back((here + step) % count);
  site_ = errorSite("init", memory.identity());
  // Connect in rounds. In each, every host has one partner, so no host waits for more than one.
  int rounds = 1;
  while (rounds < count) rounds *= 2;
  const auto limit = std::min(timeout, Network::kConnect);
  for (int round = 1; round < rounds; ++round) {
    const int peer = here ^ round;
    if (peer >= count) continue;
    const int low = std::min(here, peer), high = std::max(here, peer);
    Link& made = links_[peer];
    made.connection = lost(peer, [&] {
      return network_->connect(concat(id, "/", low, "-", high), here == low, limit,
                               [this] { faults_.throwIfPublished(site_); });
    });
    const std::size_t bytes = sizeof(Head) + room_;
    made.out.reset(new std::uint8_t[bytes]);
    for (auto& buffer : made.in) buffer.reset(new std::uint8_t[bytes]);
    while (made.lostBecause.empty() && made.coming.size() < kAhead) post(made);
  }
}

Links::~Links() {
  // Closing a connection may drop what the peer has not read. A peer has read this close notice
  // when it sends its own or closes the connection. It closes the connection if its own collective
  // cannot end any more. If the peer is late, at least its kernel has the notice.
  const auto now = Clock::now();
  const auto each = [this](auto use) {
    for (const int host : others_) {
      try {
        if (links_[host].connection != nullptr) use(links_[host]);
      } catch (const std::exception&) {  // the connection is lost
      }
    }
  };
  bool connected = false;
  each([&](Link& peer) {
    connected = true;
    peer.leaving = peer.connection->send(&peer.closeNotice, sizeof(Head), kFrames);
  });
  // Its close notice comes after the frames of collectives that this rank does not run.
  each([&](Link& peer) {
    visitArrived(peer, now + Network::kGoodbye,
                 [](const Head& head, std::size_t) { return head.closeNotice == 0; });
  });
  each([&](Link& peer) {
    if (peer.sending != nullptr) peer.sending->wait(now + Network::kDrain);
  });
  if (connected) network_->drain(now + Network::kDrain);
  close();
}

/// Calls use(head, index) for each frame behind the present one that arrives until `until`, as long
/// as it returns true. If the connection breaks, the next wait reports it.
template <typename Use>
void Links::visitArrived(Link& peer, TimePoint until, Use use) {
  for (std::size_t i = 0; i < peer.coming.size(); ++i) {
    try {
      if (peer.coming[i] != nullptr && !peer.coming[i]->wait(until)) return;
    } catch (const ConnectionLost&) {
      return;
    }
    peer.coming[i].reset();
    if (!use(headAt(peer, i + 1), i)) return;
  }
}

/// Throws if the host's close notice has arrived. If a host leaves, the connection to it may break
/// before its notice has arrived over the other one.
void Links::throwIfLeft(int host) {
  visitArrived(links_[host], Clock::now() + kNotice, [&](const Head& head, std::size_t) {
    if (head.closeNotice != 0) throwLeft(host);
    return true;
  });
}

void Links::throwLeft(int host) const {
  throw PeerLeft(ErrorKind::Backend, site_, memory_.memberName(hosts_.leader(host)),
                 " left the group (close notice sent) before ", describe(signature_), kSameCalls);
}

/// Posts a receive after those already posted. If the peer has left, the next wait reports it.
void Links::post(Link& peer) {
  try {
    const std::size_t free = (peer.present + peer.coming.size() + 1) % (kAhead + 1);
    peer.coming.push_back(
        peer.connection->receive(peer.in[free].get(), sizeof(Head) + room_, kFrames));
  } catch (const ConnectionLost& error) {
    peer.lostBecause = error.what();
  }
}

/// The head of the frame that was awaited last, or of one `ahead` of it.
Links::Head Links::headAt(const Link& peer, std::size_t ahead) const {
  Head head;
  std::memcpy(&head, peer.in[(peer.present + ahead) % (kAhead + 1)].get(), sizeof head);
  return head;
}

void Links::close() noexcept {
  for (Link& peer : links_) {
    peer.sending.reset();
    peer.leaving.reset();
    peer.coming.clear();
    peer.connection.reset();
  }
}

void Links::begin(const Request& request, ErrorSite site, trace::RecordId call) {
  request_ = &request;
  before_ = std::exchange(signature_, request.signature());
  ++call_;
  deadline_ = *request.deadline;
  timeout_ = request.timeout;
  site_ = std::move(site);
  if (call != 0 && !std::exchange(counts_, true)) {
    for (const int host : others_) links_[host].waits = trace::waitsFor(call, hosts_.leader(host));
  }
  if (!others_.empty() && links_[others_[0]].connection == nullptr) {
    throw Error(ErrorKind::Backend, site_,
                "the connections to other hosts are closed, because the group failed or was "
                "destroyed",
                kInitAgain);
  }
}

/// Waits until the last frame to the host is sent, because its memory is reused.
void Links::settle(int host) {
  try {
    wait(host, links_[host].sending);
  } catch (const ConnectionLost&) {  // the next send reports it
    links_[host].sending.reset();
  }
}

std::uint8_t* Links::frame(int host) {
  settle(host);
  return links_[host].out.get() + sizeof(Head);
}

void Links::sendFrame(int host, std::size_t bytes) {
  settle(host);
  Link& peer = links_[host];
  const Head head{signature_, call_, bytes, 0};
  std::memcpy(peer.out.get(), &head, sizeof head);
  peer.sending = lost(
      host, [&] { return peer.connection->send(peer.out.get(), sizeof head + bytes, kFrames); });
}

/// Shows a host that only sends data to this one that this one takes part. That host may have left
/// since, so a lost connection is no error.
void Links::acknowledge(int host) {
  try {
    sendFrame(host, 0);
  } catch (const ConnectionLost&) {
  }
}

void Links::compareLater(int host) {
  if (links_[host].later.has_value()) compareNext(host);
  const auto& counts = request_->expectedCount;
  const std::uint64_t expected = counts.empty() ? signature_.count : counts[hosts_.leader(host)];
  links_[host].later = Announced{signature_, expected, call_, before_};
}

/// Waits for the next frame of the host, and compares it with `later`.
void Links::compareNext(int host) {
  Link& peer = links_[host];
  if (peer.coming.empty()) {
    lost(host, [&] { throw ConnectionLost(ErrorKind::Backend, peer.lostBecause); });
  }
  wait(host, peer.coming.front());
  peer.coming.pop_front();
  peer.present = (peer.present + 1) % (kAhead + 1);
  const Announced mine = *peer.later;
  peer.later.reset();
  const Head head = headAt(peer);
  if (head.closeNotice != 0) {
    peer.coming.clear();
    peer.lostBecause = "close notice sent";
    throwLeft(host);
  }
  compare(host, mine, head);
  post(peer);
}

void Links::compare(int host, const Announced& mine, const Head& head) const {
  if (head.call == mine.call && head.bytes <= room_ &&
      agree(mine.signature, head.signature, mine.expected)) {
    if (sameResults(mine.signature, head.signature)) return;
    const RanksByDigest ranks{{mine.signature.resultBefore, {memory_.rank()}},
                              {head.signature.resultBefore, {hosts_.leader(host)}}};
    const auto name = [this](int rank) { return memory_.memberName(rank); };
    throw Error(ErrorKind::Backend, site_, differentResults(mine.before, ranks, name));
  }
  // If the roots differ, one of the two may have had nothing to send to the other. Then this frame
  // is of another collective than `mine`.
  throw Error(ErrorKind::Backend, site_,
              mismatched(memory_.rank(), describe(mine.signature),
                         memory_.memberName(hosts_.leader(host)), describe(head.signature)),
              kSameOrder);
}

std::size_t Links::frameBytes(int host) const {
  return headAt(links_[host]).bytes;
}

const std::uint8_t* Links::frameOf(int host, std::size_t bytes) const {
  if (const std::size_t there = frameBytes(host); there != bytes) {
    throw Error(ErrorKind::Backend, site_, memory_.memberName(hosts_.leader(host)), " sent ", there,
                " bytes where ", bytes, " were expected in ", describe(signature_),
                ". All ranks must pass tensors of the same shape.");
  }
  return links_[host].in[links_[host].present].get() + sizeof(Head);
}

void Links::disagree(int from, int to, std::uint64_t sent, std::uint64_t expected) const {
  throw Error(ErrorKind::Backend, site_, splitMismatch(signature_, from, to, sent, expected));
}

TransferRef Links::send(int host, const void* data, std::size_t bytes, StepTag step) {
  return lost(host, [&] { return links_[host].connection->send(data, bytes, tagOf(step, bytes)); });
}

TransferRef Links::receive(int host, void* data, std::size_t bytes, StepTag step) {
  return lost(host,
              [&] { return links_[host].connection->receive(data, bytes, tagOf(step, bytes)); });
}

void Links::wait(int host, TransferRef& transfer) {
  if (transfer == nullptr) return;
  const trace::HostWait counted(links_[host].waits, hosts_.local().size());
  const auto began = Clock::now();
  for (;;) {
    const auto until =
        std::min<TimePoint>(deadlineAfter(deadline_, grace_), Clock::now() + kWaitSlice);
    if (lost(host, [&] { return transfer->wait(until); })) break;
    check(began);
    if (transfer == nullptr) return;  // check() has found that it has ended
    if (Clock::now() >= deadlineAfter(deadline_, grace_)) late(host);
  }
  transfer.reset();
}

/// Throws if a frame of a host that is not awaited has arrived, and is of another collective. Takes
/// some milliseconds.
void Links::compareArrived(int host) {
  Link& peer = links_[host];
  visitArrived(peer, Clock::now(), [&](const Head& head, std::size_t i) {
    if (head.closeNotice != 0 || head.call > call_) return false;
    const bool isLater = i == 0 && peer.later.has_value();
    compare(host,
            isLater ? *peer.later : Announced{signature_, head.signature.count, call_, before_},
            head);
    return true;
  });
}

void Links::check(TimePoint began) {
  checkInterrupt();
  if (memory_.aborted()) {
    memory_.passOn();
    memory_.throwAborted(site_);
  }
  faults_.throwIfPublished(site_);
  if (Clock::now() < began + kUnawaited) return;
  compared_ = (compared_ + 1) % others_.size();
  compareArrived(others_[compared_]);
}

void Links::late(int host) const {
  std::string ranks;
  for (const int rank : hosts_.ranks(host)) {
    ranks += concat(ranks.empty() ? "" : ", ", memory_.memberName(rank));
  }
  throw Error(ErrorKind::Timeout, site_,
              timedOut(signature_, timeout_, concat(kUnreachable, ranks)));
}

}  // namespace fastcoll
