#include "cpu/hosts/partial_sum.hpp"

#include <algorithm>
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

bool areEqual(const std::vector<Subtree>& subtrees) {
  return std::ranges::all_of(
      subtrees, [&](const Subtree& subtree) { return subtree.count == subtrees[0].count; });
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

std::vector<Subtree> subtreesOf(const Hosts& hosts) {
  std::vector<Subtree> subtrees;
  findSubtrees(hosts, 0, hosts.size(), subtrees);
  std::vector<int> seen(hosts.count(), 0);
  for (Subtree& subtree : subtrees) subtree.index = seen[subtree.host]++;
  return subtrees;
}

PartialSum::PartialSum(const Request& request, const Hosts& hosts)
    : hosts_(hosts),
      subtrees_(subtreesOf(hosts)),
      narrowed_(request.wire == Wire::Rounds &&
                (request.op != ReduceOp::Avg || areEqual(subtrees_))),
      inner_(innerOf(request, narrowed_)),
      accumulate_(isShort(request.dtype) ? DType::Float32 : request.dtype),
      widening_(isShort(request.dtype) ? 2 : 1),
      resultWidening_(request.outputFloat32 ? 2 : 1),
      cast_(isShort(request.dtype) ? &wireCast(request.dtype) : nullptr),
      divisor_(narrowed_ ? static_cast<double>(subtrees_.size()) : hosts.size()),
      of_(hosts.count()) {
  // Each operand was multiplied when its subtree was summed.
  const bool scaled = request.op == ReduceOp::PreMulSum;
  combine_ = reduceFunction(accumulate_, scaled ? ReduceOp::Sum : combining(request.op));
  finish_ = reduceFunction(accumulate_, scaled ? ReduceOp::Sum : request.op);
  plain_.assign(of_.size(), !scaled);
  for (const Subtree& subtree : subtrees_) {
    const std::size_t host = subtree.host;
    of_[host].push_back(subtree);
    if (subtree.count > 1) plain_[host] = false;
  }
  const auto& local = hosts.local();
  for (const Subtree& subtree : of_[hosts.here()]) {
    reducers_.emplace_back(inner_, subtree.count);
    places_.push_back(static_cast<int>(std::ranges::find(local, subtree.first) - local.begin()));
  }
  root_ = plan(0, hosts.size());
  temporaries_.resize(parts_.size() * kStep);
}

int PartialSum::plan(int first, int count) {
  const auto subtree = std::ranges::find_if(
      subtrees_, [&](const Subtree& b) { return b.first == first && b.count == count; });
  Part part{-1, -1, -1};
  if (subtree != subtrees_.end()) {
    part.subtree = static_cast<int>(subtree - subtrees_.begin());
  } else {
    const int left = leftOf(count);
    part.left = plan(first, left);
    part.right = plan(first + left, count - left);
  }
  parts_.push_back(part);
  return static_cast<int>(parts_.size()) - 1;
}

void PartialSum::partial(int index, const std::vector<const std::uint8_t*>& operands,
                         std::size_t bytes, std::uint8_t* out) {
  if (bytes == 0) return;
  const std::size_t i = index;
  const Subtree& subtree = of_[hosts_.here()][i];
  const std::size_t first = places_[i];
  if (plain(hosts_.here())) {
    if (out != operands[first]) std::memcpy(out, operands[first], bytes);
    return;
  }
  for (int j = 0; j < subtree.count; ++j) {
    reducers_[i].source(j, operands[first + j]);
  }
  reducers_[i].run(out, bytes);
}

/// Returns where bytes [at, at + bytes) of a part lie, in the accumulate dtype.
const std::uint8_t* PartialSum::evaluate(int index, std::size_t at, std::size_t bytes, bool last) {
  const Part& part = parts_[index];
  std::uint8_t* out = temporary(index);
  if (part.subtree >= 0) {
    const std::size_t subtree = part.subtree;
    const std::uint8_t* partial = (*partials_)[subtree];
    if (cast_ == nullptr || !isShortOf(subtrees_[subtree].host)) return partial + at;
    cast_->widen(out, partial + at / widening_, bytes / sizeof(float));
    return out;
  }
  const void* sources[] = {evaluate(part.left, at, bytes, false),
                           evaluate(part.right, at, bytes, false)};
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
  const std::size_t all = bytes * widening_;
  for (std::size_t at = 0; at < all; at += kStep) {
    const std::size_t length = std::min(kStep, all - at);
    const std::uint8_t* sum = evaluate(root_, at, length, true);
    if (widening_ != resultWidening_) {
      cast_->narrow(out + at / widening_, sum, length / sizeof(float));
    } else {
      std::memcpy(out + at, sum, length);
    }
  }
}

}  // namespace fastcoll
