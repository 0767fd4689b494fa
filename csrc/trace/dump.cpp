// The trace in the format of torch's flight recorder, version 2.10, which `torchfrtrace` reads.
//
// A dict of our own, "fastcoll", in the dump and in each entry holds what that format cannot
// express. The differences:
//   - Its reader accepts known libraries only. "gloo:" stands for calls on the CPU, "nccl:" for
//     calls on a device. fastcoll.info.groups() reports what really moved the bytes.
//   - It expects all ranks of a group in every sequence number, but a message has two ranks. Here
//     the messages from one rank to another with one tag are a group of their own.
//   - A failed call keeps its state there, "started" or "scheduled". Our dict has the error.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/error.hpp"
#include "base/topology.hpp"
#include "base/utf8.hpp"
#include "trace/recorder.hpp"

namespace fastcoll::trace {
namespace {

/// Writes Python's pickle format (protocol 2) without Python, because a dump must be possible while
/// another thread holds the interpreter, or hangs in it. Call in document order. A dict takes keys
/// and values in turns, between beginDict() and endDict().
class Pickle {
 public:
  Pickle& none() { return op('N'); }
  Pickle& boolean(bool value) { return op(value ? '\x88' : '\x89'); }
  Pickle& integer(std::int64_t value) {
    const bool small = value == static_cast<std::int32_t>(value);
    return small ? op('J').little(value, 4) : op('\x8a').op('\x08').little(value, 8);
  }
  Pickle& real(double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, 8);
    return op('G').little(__builtin_bswap64(bits), 8);
  }
  /// Bytes that are not UTF-8 are written as '?'.
  Pickle& text(std::string_view value) {
    const std::string clean = validUtf8(std::string(value));
    op('X').little(clean.size(), 4);
    bytes_ += clean;
    return *this;
  }
  Pickle& beginDict() { return op('}').op('('); }
  Pickle& endDict() { return op('u'); }
  Pickle& beginList() { return op(']').op('('); }
  Pickle& endList() { return op('e'); }
  /// Makes a tuple of the last two values.
  Pickle& pair() { return op('\x86'); }

  Pickle& key(std::string_view name) { return text(name); }
  Pickle& field(std::string_view name, std::int64_t value) { return text(name).integer(value); }
  Pickle& field(std::string_view name, std::string_view value) { return text(name).text(value); }
  Pickle& flag(std::string_view name, bool value) { return text(name).boolean(value); }

  /// Ends the pickle and returns all of it. Call nothing after it.
  std::string finish() { return std::move(op('.').bytes_); }

 private:
  Pickle& op(char code) {
    bytes_.push_back(code);
    return *this;
  }
  Pickle& little(std::uint64_t value, int count) {
    for (int i = 0; i < count; ++i) op(static_cast<char>(value >> (8 * i) & 0xff));
    return *this;
  }
  std::string bytes_ = "\x80\x02";
};

/// One sequence of numbers, dumped as a process group of its own.
struct LaneInfo {
  std::string name;
  std::string description;
  std::vector<int> ranks;  // in the whole job
  std::uint64_t enqueued = 0;
  std::uint64_t started = 0;
  std::uint64_t completed = 0;
};

struct Snapshot : Known {
  std::vector<Record> records;
};

Snapshot snapshot(Recorder& all) {
  Snapshot copy;
  copy.records = all.ring.read();
  const std::lock_guard<std::mutex> lock(all.mutex);
  static_cast<Known&>(copy) = all;
  return copy;
}

// Indexed by Lane and by State.
constexpr const char* kLanes[] = {"collective", "device", "message", "monitored_barrier"};
constexpr const char* kStates[] = {"scheduled", "started", "completed", "failed"};

/// The newest group of a name has the plain name: it matters most. Ranks need not have made the
/// same number of groups before it.
std::string groupName(const Snapshot& all, const KnownGroup& known) {
  const int age = all.instances.at(known.group.name) - 1 - known.instance;
  return age == 0 ? known.group.name : concat(known.group.name, " earlier ", age);
}

/// A message's sender and receiver, as ranks of the group. The sender is negative while a receiver
/// has not found a message.
std::pair<int, int> endsOf(const Record& record, const Group& group) {
  const int peer = static_cast<int>(record.peer);
  return record.sends ? std::pair{group.rank, peer} : std::pair{peer, group.rank};
}

std::string laneName(const Record& record, const KnownGroup& known, const std::string& name) {
  if (record.lane == Lane::Collective) return name;
  if (record.lane == Lane::Device) return name + " on device";
  if (record.lane == Lane::MonitoredBarrier) return name + " monitored_barrier";
  const auto [from, to] = endsOf(record, known.group);
  if (from < 0) return concat(name, " recv from any rank tag ", record.tag);
  return concat(name, " send ", from, "->", to, " tag ", record.tag,
                record.device ? " on device" : "");
}

/// "all_reduce", or "send 0->1" in ranks of the message's own group.
std::string operation(const Record& record, const Group& group) {
  if (record.lane != Lane::Message) return record.name;
  const auto [from, to] = endsOf(record, group);
  // A receive that has found no message is a group of one, because it has no sender.
  if (from < 0) return "recv 0<-0";
  const bool ascends = group.ranks.at(from) < group.ranks.at(to);
  const int source = ascends ? 0 : 1;
  return record.sends ? concat("send ", source, "->", 1 - source)
                      : concat("recv ", 1 - source, "<-", source);
}

std::vector<int> laneRanks(const Record& record, const Group& group) {
  if (record.lane != Lane::Message) return group.ranks;
  const auto [from, to] = endsOf(record, group);
  std::vector<int> ranks;
  if (from >= 0) ranks.push_back(group.ranks.at(from));
  ranks.push_back(group.ranks.at(to));
  std::ranges::sort(ranks);
  return ranks;
}

std::string listText(const std::vector<int>& values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    text += concat(i == 0 ? "" : ", ", values[i]);
  }
  return text + "]";
}

void putShapes(Pickle& out, const Shapes& shapes) {
  int at = 0;
  for (const bool output : {false, true}) {
    const int kept = output ? shapes.keptOutputs : shapes.keptInputs;
    const int first = at;
    out.key(output ? "output_sizes" : "input_sizes").beginList();
    for (int i = 0; i < kept; ++i) {
      const auto dims = static_cast<int>(shapes.words[at++] >> 8);
      out.beginList();
      for (int d = 0; d < dims; ++d) out.integer(static_cast<std::int64_t>(shapes.words[at++]));
      out.endList();
    }
    out.endList();
    at = first;
    out.key(output ? "output_dtypes" : "input_dtypes").beginList();
    for (int i = 0; i < kept; ++i) {
      const std::uint64_t header = shapes.words[at];
      out.text(dtypeName(static_cast<DType>(header & 0xff)));
      at += 1 + static_cast<int>(header >> 8);
    }
    out.endList();
  }
}

void putFrames(Pickle& out, const std::string& stack) {
  out.key("frames").beginList();
  std::size_t begin = 0;
  while (begin < stack.size()) {
    const std::size_t end = std::min(stack.find('\n', begin), stack.size());
    const std::string line = stack.substr(begin, end - begin);
    const std::size_t first = line.find('\t');
    const std::size_t last = line.rfind('\t');
    if (first != std::string::npos && last > first) {
      out.beginDict();
      out.field("name", line.substr(0, first));
      out.field("filename", line.substr(first + 1, last - first - 1));
      out.field("line", std::int64_t{std::atoi(line.c_str() + last + 1)});
      out.endDict();
    }
    begin = end + 1;
  }
  out.endList();
}

void putEntry(Pickle& out, const Record& record, const KnownGroup& known, const LaneInfo& lane,
              const Snapshot& all, const Ticks::Wall& wall) {
  const auto state = static_cast<State>(record.state);
  const bool message = record.lane == Lane::Message;
  const bool began = record.started != 0;
  const auto moment = [&](const char* name, std::int64_t ticks) {
    out.key(name);
    ticks == 0 ? out.none() : out.integer(wall(ticks));
  };
  out.beginDict();
  out.field("record_id", static_cast<std::int64_t>(record.id));
  out.field("pg_id", std::int64_t{record.group});
  out.key("process_group").text(lane.name).text(lane.description).pair();
  out.field("collective_seq_id", static_cast<std::int64_t>(record.seq));
  out.field("p2p_seq_id", message ? static_cast<std::int64_t>(record.seq) : 0);
  out.field("op_id", static_cast<std::int64_t>(record.seq));
  out.field("profiling_name",
            concat(record.device ? "nccl:" : "gloo:", operation(record, known.group)));
  putShapes(out, record.shapes);
  moment("time_created_ns", record.created);
  moment("time_discovered_started_ns", record.started);
  const bool completed = state == State::Completed;
  moment("time_discovered_completed_ns", completed ? record.ended : 0);
  if (completed && began) {
    out.key("duration_ms").real(wall.milliseconds(record.ended - record.started));
  }
  out.field("state", completed ? "completed" : began ? "started" : "scheduled");
  out.flag("retired", record.ended != 0);
  out.field("timeout_ms", record.timeoutMillis);
  out.flag("is_p2p", message);
  const bool hasStack = record.stack != 0 && record.stack <= all.stackTexts.size();
  putFrames(out, hasStack ? *all.stackTexts[record.stack - 1] : "");

  out.key("fastcoll").beginDict();
  out.field("group", groupName(all, known));
  out.field("lane", kLanes[static_cast<int>(record.lane)]);
  out.field("seq", static_cast<std::int64_t>(record.seq));
  out.field("name", record.name);
  out.field("state", kStates[record.state]);
  moment("ended_ns", record.ended);
  if (record.op != ReduceOp::None) out.field("op", reduceOpName(record.op));
  if (record.root >= 0) out.field("root", std::int64_t{record.root});
  if (message) {
    const auto [from, to] = endsOf(record, known.group);
    out.flag("sends", record.sends).field("tag", std::int64_t{record.tag});
    out.field("from", std::int64_t{from}).field("to", std::int64_t{to});
  }
  out.field("tensors_left_out", std::int64_t{record.shapes.inputs + record.shapes.outputs -
                                             record.shapes.keptInputs - record.shapes.keptOutputs});
  if (const auto error = all.errors.find(record.id); error != all.errors.end()) {
    out.field("error", error->second);
  }
  out.endDict();
  out.endDict();
}

void putGroups(Pickle& out, const std::map<std::string, LaneInfo>& lanes) {
  out.key("pg_config").beginDict();
  for (const auto& [name, lane] : lanes) {
    out.key(name).beginDict();
    out.field("name", name).field("desc", lane.description).field("ranks", listText(lane.ranks));
    out.endDict();
  }
  out.endDict();
  out.key("pg_status").beginDict();
  for (const auto& [name, lane] : lanes) {
    out.key(name).beginDict();
    out.field("last_enqueued_collective", concat(lane.enqueued));
    out.field("last_started_collective", concat(lane.started));
    out.field("last_completed_collective", concat(lane.completed));
    out.endDict();
  }
  out.endDict();
}

}  // namespace

std::string dump(const std::string& reason) {
  Recorder* const recorder = trace::recorder();
  if (recorder == nullptr) return "";
  const Snapshot all = snapshot(*recorder);
  const Ticks::Wall wall(recorder->ticks);

  std::map<std::string, LaneInfo> lanes;
  // Include groups whose records are all overwritten: their ranks may wait for this one.
  for (const auto& [number, known] : all.groups) {
    const std::string name = groupName(all, known);
    lanes.try_emplace(name, LaneInfo{name, known.group.description, known.group.ranks});
  }
  std::vector<std::pair<const Record*, const LaneInfo*>> entries;
  std::uint64_t lost = 0;
  for (const Record& record : all.records) {
    const auto found = all.groups.find(record.group);
    if (found == all.groups.end()) {
      ++lost;
      continue;
    }
    const KnownGroup& known = found->second;
    const std::string name = laneName(record, known, groupName(all, known));
    auto& lane = lanes
                     .try_emplace(name, LaneInfo{name, known.group.description,
                                                 laneRanks(record, known.group)})
                     .first->second;
    lane.enqueued = std::max(lane.enqueued, record.seq);
    if (record.started != 0) lane.started = std::max(lane.started, record.seq);
    if (static_cast<State>(record.state) == State::Completed) {
      lane.completed = std::max(lane.completed, record.seq);
    }
    entries.emplace_back(&record, &lane);
  }

  Pickle out;
  out.beginDict();
  out.field("version", "2.10");
  putGroups(out, lanes);
  out.key("entries").beginList();
  for (const auto& [record, lane] : entries) {
    putEntry(out, *record, all.groups.at(record->group), *lane, all, wall);
  }
  out.endList();

  out.key("fastcoll").beginDict();
  out.field("version", recorder->version);
  out.field("reason", reason);
  out.field("rank", std::int64_t{all.rank});
  out.field("host", hostName());
  out.field("pid", std::int64_t{::getpid()});
  out.field("time_ns", wall(recorder->ticks.now()));
  out.field("size", static_cast<std::int64_t>(recorder->ring.size()));
  out.field("recorded", static_cast<std::int64_t>(recorder->ring.last()));
  out.field("unreadable", static_cast<std::int64_t>(lost));
  out.flag("stacks", recorder->stacks);
  out.endDict();
  out.endDict();
  return out.finish();
}

std::string write(const std::string& reason, std::string path) {
  Recorder* const all = recorder();
  if (all == nullptr) {
    throw Error(ErrorKind::Value,
                "fastcoll.trace: nothing is recorded. Make a group first, and leave "
                "FASTCOLL_TRACE_SIZE above 0.");
  }
  // One lock for the copy and the file: no dump may replace a later one.
  const std::lock_guard<std::mutex> lock(all->fileMutex);
  const std::string bytes = dump(reason);
  if (path.empty()) {
    const std::lock_guard<std::mutex> names(all->mutex);
    path = concat(all->prefix(), all->rank);
  }
  // A reader during the write finds the former file or the new one. The temporary name begins with
  // a dot, so a reader of all files with the prefix skips it.
  const std::size_t slash = path.rfind('/') + 1;
  const std::string part =
      concat(path.substr(0, slash), ".", path.substr(slash), ".part", ::getpid());
  // In a folder that other users may write to, do not follow their link under this name.
  ::unlink(part.c_str());
  const int fd = ::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  std::FILE* const file = fd < 0 ? nullptr : ::fdopen(fd, "wb");
  bool worked = file != nullptr;
  if (worked) {
    worked = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
    worked = std::fclose(file) == 0 && worked;
    worked = worked && std::rename(part.c_str(), path.c_str()) == 0;
  }
  if (!worked) {
    const std::string why = std::strerror(errno);
    if (file == nullptr && fd >= 0) ::close(fd);
    if (fd >= 0) ::unlink(part.c_str());
    throw Error(ErrorKind::Value, "fastcoll.trace: ", path, " cannot be written: ", why,
                ". Name a prefix in a folder that exists.");
  }
  return path;
}

}  // namespace fastcoll::trace
