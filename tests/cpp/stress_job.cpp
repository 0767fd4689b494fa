// Collectives whose result is known: element i of rank r's input is a small whole number computed
// from (seed, r, i), so every dtype holds every sum exactly.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "stress_harness.hpp"

namespace stress {
namespace {

double valueOf(std::uint64_t seed, int rank, std::size_t index) {
  std::uint64_t x = seed + 0x9e3779b97f4a7c15ull * (static_cast<std::uint64_t>(rank) + 1) + index;
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
  x ^= x >> 29;
  return static_cast<double>(x % 4);
}

std::uint16_t halfOf(double value) {
  if (value == 0) return 0;
  int exponent = 0;
  while (value >= 2) value /= 2, ++exponent;
  while (value < 1) value *= 2, --exponent;
  return static_cast<std::uint16_t>((exponent + 15) << 10 | static_cast<int>((value - 1) * 1024));
}

template <typename T>
void put(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

void encode(DType dtype, double value, std::uint8_t* to) {
  switch (dtype) {
    case DType::Int16:
      return put(to, static_cast<std::int16_t>(value));
    case DType::Int32:
      return put(to, static_cast<std::int32_t>(value));
    case DType::Int64:
      return put(to, static_cast<std::int64_t>(value));
    case DType::Float16:
      return put(to, halfOf(value));
    case DType::BFloat16:
      return put(to, std::bit_cast<std::array<std::uint16_t, 2>>(static_cast<float>(value))[1]);
    case DType::Float32:
      return put(to, static_cast<float>(value));
    case DType::Float64:
      return put(to, value);
    case DType::Complex64:
      put(to, static_cast<float>(value));
      return put(to + 4, static_cast<float>(value));
    case DType::Complex128:
      put(to, value);
      return put(to + 8, value);
    default:
      return put(to, static_cast<std::uint8_t>(value));
  }
}

double combined(const Plan& plan, int ranks, std::size_t index) {
  double result = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const double factor = plan.op == ReduceOp::PreMulSum ? 0.5 : 1;
    const double value = factor * valueOf(plan.seed, rank, index);
    const auto a = static_cast<unsigned>(result);
    const auto b = static_cast<unsigned>(value);
    if (rank == 0) {
      result = value;
      continue;
    }
    switch (plan.op) {
      case ReduceOp::Product:
        result *= value;
        break;
      case ReduceOp::Min:
        result = std::min(result, value);
        break;
      case ReduceOp::Max:
        result = std::max(result, value);
        break;
      case ReduceOp::BitAnd:
        result = a & b;
        break;
      case ReduceOp::BitOr:
        result = a | b;
        break;
      case ReduceOp::BitXor:
        result = a ^ b;
        break;
      default:
        result += value;
    }
  }
  return result;
}

bool reduces(Collective collective) {
  return collective == Collective::AllReduce || collective == Collective::Reduce ||
         collective == Collective::ReduceScatter;
}

bool rooted(Collective collective) {
  return collective == Collective::Broadcast || collective == Collective::Reduce ||
         collective == Collective::Gather || collective == Collective::Scatter;
}

/// Elements that `from` sends to `to`, if the messages differ.
std::size_t countOf(const Plan& plan, int from, int to) {
  if (!plan.uneven) return plan.count;
  const std::uint64_t draw = (plan.seed >> 8) * 31 + static_cast<std::uint64_t>(from) * 7 +
                             static_cast<std::uint64_t>(to) * 13;
  return draw % 5 == 0 ? 0 : plan.count * (draw % 4 + 1) / 4;
}

}  // namespace

std::string describe(const Plan& plan) {
  return concat(collectiveName(plan.collective), "(", dtypeName(plan.dtype), "[", plan.count, "], ",
                reduceOpName(plan.op), ", root ", plan.root, plan.uneven ? ", uneven" : "",
                plan.inPlace ? ", in place" : "", plan.spans ? ", spans" : "",
                plan.narrow ? ", as bfloat16" : "", plan.measured ? ", measured" : "", ", seed ",
                plan.seed, ")");
}

Plan draw(Random& random, Collective collective, std::size_t count, int ranks) {
  static const DType types[] = {DType::UInt8,     DType::Int16,     DType::Int32,   DType::Int64,
                                DType::Float16,   DType::BFloat16,  DType::Float32, DType::Float64,
                                DType::Complex64, DType::Complex128};
  static const ReduceOp anyOps[] = {ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product};
  static const ReduceOp bitOps[] = {ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor};
  Plan plan;
  plan.collective = collective;
  plan.seed = random();
  plan.dtype = types[drawBelow(random, std::size(types))];
  plan.count = collective == Collective::Barrier ? 0 : count;
  plan.root = rooted(collective)
                  ? static_cast<int>(drawBelow(random, static_cast<std::size_t>(ranks)))
                  : -1;
  plan.spans = chance(random, 3);
  plan.inPlace = chance(random, 2);
  plan.uneven = chance(random, 2) &&
                (collective == Collective::AllGather || collective == Collective::AllToAll);
  const std::uint64_t choice = random();
  if (!reduces(collective)) {
    if (chance(random, 3)) plan.dtype = DType::Opaque;
    return plan;
  }
  const bool complex = plan.dtype >= DType::Complex64;
  if (complex) {
    plan.op = ReduceOp::Sum;
  } else if (plan.dtype < DType::Float16) {
    plan.op = choice % 2 != 0 ? bitOps[choice / 2 % 3] : anyOps[choice / 2 % 4];
  } else {
    plan.op = choice % 5 == 0 ? ReduceOp::PreMulSum : anyOps[choice / 5 % 4];
  }
  if (collective != Collective::Reduce && plan.dtype == DType::Float32) {
    plan.narrow = chance(random, 2);
    plan.measured = chance(random, 2);
    // Its input and its output differ in size.
    if (plan.narrow && collective == Collective::ReduceScatter) plan.inPlace = false;
  }
  // 3^ranks must fit every dtype.
  if (plan.op == ReduceOp::Product && ranks > 4) plan.op = ReduceOp::Sum;
  return plan;
}

Plan drawAny(Random& random, int ranks, std::size_t most) {
  const auto collective = static_cast<Collective>(drawBelow(random, 9));
  std::size_t count = drawBelow(random, 64);
  if (chance(random, 2)) count = drawBelow(random, most / 8);
  if (chance(random, 8)) count = drawBelow(random, most);
  if (collective == Collective::AllToAll || collective == Collective::ReduceScatter) count /= 2;
  return draw(random, collective, count, ranks);
}

Job::Job(const Plan& plan, int rank, int ranks, Milliseconds timeout, std::shared_ptr<Arena> shared)
    : plan_(plan),
      rank_(rank),
      ranks_(ranks),
      random_(plan.seed * 31 + static_cast<unsigned>(rank)),
      arena_(std::move(shared)) {
  if (arena_ != nullptr) {
    extent_ =
        arena_->allocate(static_cast<std::size_t>(ranks) * plan.count * elementSize(plan.dtype));
  }
  completion = std::make_shared<Completion>();
  request.collective = plan.collective;
  request.dtype = plan.narrow ? DType::BFloat16 : plan.dtype;
  request.outputFloat32 = plan.narrow && plan.collective == Collective::ReduceScatter;
  if (plan.measured) request.squares = &squares_;
  request.op = plan.op;
  request.root = plan.root;
  request.factor = plan.op == ReduceOp::PreMulSum ? 0.5 : 1.0;
  request.timeout = timeout;
  request.count = plan.count;
  const std::size_t element = elementSize(plan.dtype);
  const std::size_t bytes = plan.count * element;
  const bool root = rank == plan.root;
  const auto reduced = [this](std::size_t i) { return combined(plan_, ranks_, i); };
  const auto valuesFrom = [this](int from, int to) {
    return [this, from, to](std::size_t i) {
      return valueOf(plan_.seed + 977u * static_cast<unsigned>(to), from, i);
    };
  };
  switch (plan.collective) {
    case Collective::AllReduce:
    case Collective::Reduce: {
      const bool gets = plan.collective == Collective::AllReduce || root;
      std::uint8_t* data = given(bytes);
      request.in.push_back(source(rank, 0, plan.count, data));
      if (gets) {
        // In place means exactly the same pieces, as for one list of tensors.
        const Message& in = request.in[0];
        request.out.push_back(plan.inPlace ? in : Message());
        if (!plan.inPlace) request.out[0] = sink(plan.count, reduced);
        if (plan.inPlace) expected_.push_back({data, plan.count, reduced});
      }
      break;
    }
    case Collective::Broadcast:
      if (root) {
        request.in.push_back(source(rank, 0, plan.count));
      } else {
        request.out.push_back(sink(plan.count, valuesFrom(plan.root, 0)));
      }
      break;
    case Collective::AllGather:
    case Collective::Gather: {
      request.count = countOf(plan, rank, 0);
      const bool gets = plan.collective == Collective::AllGather || root;
      std::uint8_t* data = given(request.count * element);
      request.in.push_back(source(rank, 0, request.count, data));
      for (int from = 0; gets && from < ranks; ++from) {
        const bool same = plan.inPlace && from == rank;
        const std::size_t count = countOf(plan, from, 0);
        request.out.push_back(same ? request.in[0] : sink(count, valuesFrom(from, 0)));
        if (same) expected_.push_back({data, count, valuesFrom(from, 0)});
        if (plan.uneven) request.expectedCount.push_back(count);
      }
      break;
    }
    case Collective::Scatter:
      for (int to = 0; root && to < ranks; ++to) request.in.push_back(source(rank, to, plan.count));
      request.out.push_back(sink(plan.count, valuesFrom(plan.root, rank)));
      break;
    case Collective::ReduceScatter: {
      // The values of a piece depend on its place, so a misplaced piece is detected.
      const auto offset = [this](std::size_t to) { return to * (plan_.count + 3); };
      std::uint8_t* own = nullptr;
      for (int to = 0; to < ranks; ++to) {
        std::uint8_t* data = given(bytes);
        for (std::size_t i = 0; i < plan.count; ++i) {
          encode(plan.dtype, valueOf(plan.seed, rank, offset(static_cast<std::size_t>(to)) + i),
                 data + i * element);
        }
        if (to == rank) own = data;
        request.in.push_back(message(data, bytes));
      }
      const auto value = [this, offset](std::size_t i) {
        return combined(plan_, ranks_, offset(static_cast<std::size_t>(rank_)) + i);
      };
      request.out.push_back(plan.inPlace ? request.in[static_cast<std::size_t>(rank)]
                                         : sink(plan.count, value));
      if (plan.inPlace) expected_.push_back({own, plan.count, value});
      break;
    }
    case Collective::AllToAll:
      request.count = 0;
      for (int peer = 0; peer < ranks; ++peer) {
        request.in.push_back(source(rank, peer, countOf(plan, rank, peer)));
        request.out.push_back(sink(countOf(plan, peer, rank), valuesFrom(peer, rank)));
        request.count += countOf(plan, rank, peer);
      }
      break;
    default:
      break;
  }
}

Job::~Job() {
  if (arena_ != nullptr) arena_->release(extent_);
}

/// Memory for this rank's input; in the arena, one message after the other.
std::uint8_t* Job::given(std::size_t bytes) {
  if (arena_ == nullptr) return buffer(bytes);
  std::uint8_t* data = arena_->base() + extent_ + used_;
  used_ += bytes;
  return data;
}

std::uint8_t* Job::buffer(std::size_t bytes) {
  buffers_.push_back(std::make_unique<std::uint8_t[]>(std::max<std::size_t>(bytes, 1)));
  return buffers_.back().get();
}

Message Job::message(std::uint8_t* data, std::size_t bytes, bool whole) {
  Message cut = plan_.narrow && !whole ? Message(wireCast(DType::BFloat16)) : Message();
  if (!plan_.spans) {
    cut.append(data, bytes);
    return cut;
  }
  const std::size_t element = elementSize(plan_.dtype);
  for (std::size_t at = 0; at < bytes;) {
    const std::size_t left = (bytes - at) / element;
    const std::size_t take = (1 + drawBelow(random_, left)) * element;
    cut.append(data + at, take);
    at += take;
  }
  return cut;
}

Message Job::source(int from, int to, std::size_t count, std::uint8_t* data) {
  const std::size_t element = elementSize(plan_.dtype);
  if (data == nullptr) data = given(count * element);
  const std::uint64_t seed = plan_.seed + 977u * static_cast<unsigned>(to);
  for (std::size_t i = 0; i < count; ++i) {
    encode(plan_.dtype, valueOf(seed, from, i), data + i * element);
  }
  return message(data, count * element);
}

Message Job::sink(std::size_t count, std::function<double(std::size_t)> value, std::uint8_t* data) {
  const std::size_t bytes = count * elementSize(plan_.dtype);
  if (data == nullptr) data = buffer(bytes);
  std::memset(data, 0xa5, bytes);
  expected_.push_back({data, count, std::move(value)});
  return message(data, bytes, request.outputFloat32);
}

void Job::verify() const {
  const std::size_t element = elementSize(plan_.dtype);
  std::uint8_t want[16] = {};
  for (const Expected& part : expected_) {
    for (std::size_t i = 0; i < part.count; ++i) {
      const double value = part.value(i);
      encode(plan_.dtype, value, want);
      REQUIRE(std::memcmp(want, part.at + i * element, element) == 0, "WRONG DATA: rank ", rank_,
              "/", ranks_, ", seq ", request.seq, ", ", describe(plan_), ": element ", i,
              " is not ", value);
    }
  }
  verifySquares();
}

/// Checks only a reduce-scatter: this rank's share is its whole result, so the squares are known.
void Job::verifySquares() const {
  if (!plan_.measured || plan_.collective != Collective::ReduceScatter) return;
  double total = 0;
  for (std::size_t i = 0; i < plan_.count; ++i) {
    total += expected_[0].value(i) * expected_[0].value(i);
  }
  REQUIRE(squares_ == total, "WRONG SQUARES: rank ", rank_, "/", ranks_, ", ", describe(plan_),
          ": ", squares_, " is not ", total);
}

void Job::check() const {
  if (completion->fault) std::rethrow_exception(completion->fault);
  verify();
}

Plan sum(std::size_t count) {
  Plan plan;
  plan.collective = Collective::AllReduce;
  plan.op = ReduceOp::Sum;
  plan.count = count;
  return plan;
}

JobRef job(const Rank& me, const Plan& plan, int timeoutMs) {
  return std::make_shared<Job>(plan, me.rank, me.size, Milliseconds(timeoutMs));
}

std::jthread abortAfter(const Engine& engine, std::size_t micros, const char* why) {
  return std::jthread([engine, micros, why] {
    std::this_thread::sleep_for(std::chrono::microseconds(micros));
    engine->abort(ErrorKind::Backend, why);
  });
}

void finish(CpuEngine& engine, const Job& job) {
  engine.wait(*job.completion);
  job.check();
}

void runChecked(const Rank& me, CpuEngine& engine, const Plan& plan) {
  const auto job = std::make_shared<Job>(plan, me.rank, me.size);
  engine.runInline(job);
  job->verify();
}

}  // namespace stress
