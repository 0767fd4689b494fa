#include "cpu/hosts/partial_sum.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace fastcoll {
namespace {

int leftOf(int count) {
  int left = 1;
  while (2 * left < count) left *= 2;
  return left;
}

void findSubtrees(const Hosts& hosts, int first, int count, std::vector<Subtree>& found) {
  const int host = hosts.hostOf(first);
  bool together = true;
  for (int rank = first; rank < first + count; ++rank) {
    together = together && hosts.hostOf(rank) == host;
  }
  if (together) {
    found.push_back({first, count, host, 0});
    return;
  }
  const int left = leftOf(count);
  findSubtrees(hosts, first, left, found);
  findSubtrees(hosts, first + left, count - left, found);
}

bool isShort(DType dtype) {
  return dtype == DType::Float16 || dtype == DType::BFloat16;
}

/// How the operands of a subtree, and partial results, are combined.
ReduceOp combining(ReduceOp op) {
  return op == ReduceOp::Avg ? ReduceOp::Sum : op;
}

/// The request that sums one subtree: the same, but without division and rounding. If
/// `narrowed`, the partial result is rounded, and an average is the subtree's own, which cannot
/// overflow.
Request innerOf(const Request& request, bool narrowed) {
  Request inner;
  inner.dtype = request.dtype;
  inner.op = narrowed ? request.op : combining(request.op);
  inner.factor = request.factor;
  inner.outputFloat32 = isShort(request.dtype) && !narrowed;
  return inner;
}

}  // namespace

SumTree::SumTree(const Hosts& hosts) : of(hosts.count()) {
  findSubtrees(hosts, 0, hosts.size(), subtrees);
  even = true;
  for (Subtree& subtree : subtrees) {
    std::vector<Subtree>& siblings = of[subtree.host];
    subtree.index = static_cast<int>(siblings.size());
    siblings.push_back(subtree);
    even = even && subtree.count == subtrees[0].count;
  }
  const auto& local = hosts.local();
  for (const Subtree& subtree : of[hosts.here()]) {
    places.push_back(static_cast<int>(std::ranges::find(local, subtree.first) - local.begin()));
  }
  add(0, hosts.size());
}

/// Adds the sum of ranks [first, first + count), behind those that it is made of.
int SumTree::add(int first, int count) {
  const auto subtree = std::ranges::find_if(
      subtrees, [&](const Subtree& b) { return b.first == first && b.count == count; });
  Part part{-1, -1, -1};
  if (subtree != subtrees.end()) {
    part.subtree = static_cast<int>(subtree - subtrees.begin());
  } else {
    const int left = leftOf(count);
    part.left = add(first, left);
    part.right = add(first + left, count - left);
  }
  parts.push_back(part);
  return static_cast<int>(parts.size()) - 1;
}

PartialSum::PartialSum(const Request& request, const Hosts& hosts, const SumTree& tree)
    : tree_(tree),
      here_(hosts.here()),
      narrowed_(request.wire == Wire::Rounds && (request.op != ReduceOp::Avg || tree.even)),
      inner_(innerOf(request, narrowed_)),
      accumulate_(isShort(request.dtype) ? DType::Float32 : request.dtype),
      widening_(isShort(request.dtype) ? 2 : 1),
      resultWidening_(request.outputFloat32 ? 2 : 1),
      cast_(isShort(request.dtype) ? &wireCast(request.dtype) : nullptr),
      divisor_(narrowed_ ? static_cast<double>(count()) : hosts.size()) {
  // Each operand was multiplied when its subtree was summed.
  const bool scaled = request.op == ReduceOp::PreMulSum;
  combine_ = reduceFunction(accumulate_, scaled ? ReduceOp::Sum : combining(request.op));
  finish_ = reduceFunction(accumulate_, scaled ? ReduceOp::Sum : request.op);
  for (const auto& subtrees : tree.of) {
    plain_.push_back(!scaled && std::ranges::all_of(subtrees, [](const Subtree& subtree) {
      return subtree.count == 1;
    }));
  }
  for (const Subtree& subtree : tree.of[here_]) reducers_.emplace_back(inner_, subtree.count);
}

void PartialSum::partial(int index, const std::vector<const std::uint8_t*>& operands,
                         std::size_t bytes, std::uint8_t* out) {
  if (bytes == 0) return;
  const std::size_t i = index;
  const std::size_t first = tree_.places[i];
  if (plain(here_)) {
    return Message(out, bytes).write(0, bytes, operands[first]);
  }
  for (int j = 0; j < tree_.of[here_][i].count; ++j) {
    reducers_[i].source(j, operands[first + j]);
  }
  reducers_[i].run(out, bytes);
}

/// Returns where bytes [at, at + bytes) of a part lie, in the accumulate dtype: in `out` or in a
/// partial result. `out` has kStep bytes.
const std::uint8_t* PartialSum::evaluate(int index, std::size_t at, std::size_t bytes, bool last,
                                         std::uint8_t* out) const {
  const SumTree::Part& part = tree_.parts[index];
  if (part.subtree >= 0) {
    const std::size_t subtree = part.subtree;
    const std::uint8_t* partial = (*partials_)[subtree];
    if (cast_ == nullptr || !isShortOf(tree_.subtrees[subtree].host)) return partial + at;
    cast_->widen(out, partial + at / widening_, bytes / sizeof(float));
    return out;
  }
  alignas(64) std::array<std::uint8_t, kStep> spare;
  const void* sources[] = {evaluate(part.left, at, bytes, false, out),
                           evaluate(part.right, at, bytes, false, spare.data())};
  ReduceArgs args{};
  args.dst = out;
  args.srcs = sources;
  args.k = 2;
  args.count = bytes / elementSize(accumulate_);
  args.divisor = divisor_;
  (last ? finish_ : combine_)(args);
  return out;
}

void PartialSum::total(const std::vector<const std::uint8_t*>& partials, std::size_t bytes,
                       std::uint8_t* out) {
  partials_ = &partials;
  const int root = static_cast<int>(tree_.parts.size()) - 1;
  Helpers::inChunks(bytes * widening_, [&](std::size_t begin, std::size_t end) {
    alignas(64) std::array<std::uint8_t, kStep> block;
    for (std::size_t at = begin; at < end; at += kStep) {
      const std::size_t length = std::min(kStep, end - at);
      const std::uint8_t* sum = evaluate(root, at, length, true, block.data());
      if (widening_ != resultWidening_) {
        cast_->narrow(out + at / widening_, sum, length / sizeof(float));
      } else {
        std::memcpy(out + at, sum, length);
      }
    }
  });
}

}  // namespace fastcoll
