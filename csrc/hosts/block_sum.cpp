#include "block_sum.hpp"

#include <algorithm>
#include <cstring>

namespace fastcoll {
namespace {

int leftOf(int count) {
  int left = 1;
  while (2 * left < count) left *= 2;
  return left;
}

void findBlocks(const Hosts& hosts, int first, int count, std::vector<Block>& found) {
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
  findBlocks(hosts, first, left, found);
  findBlocks(hosts, first + left, count - left, found);
}

bool isShort(DType dtype) {
  return dtype == DType::Float16 || dtype == DType::BFloat16;
}

/// How the operands of a block, and partial results, are combined.
ReduceOp combining(ReduceOp op) {
  return op == ReduceOp::Avg ? ReduceOp::Sum : op;
}

bool areEqual(const std::vector<Block>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(),
                     [&](const Block& block) { return block.count == blocks[0].count; });
}

/// The request that sums one block: the same, but without division and rounding. If `narrowed`, the
/// partial result is rounded, and an average is the block's own, which cannot overflow.
Request innerOf(const Request& request, bool narrowed) {
  Request inner;
  inner.dtype = request.dtype;
  inner.op = narrowed ? request.op : combining(request.op);
  inner.factor = request.factor;
  inner.widened = isShort(request.dtype) && !narrowed;
  return inner;
}

}  // namespace

std::vector<Block> blocksOf(const Hosts& hosts) {
  std::vector<Block> blocks;
  findBlocks(hosts, 0, hosts.size(), blocks);
  std::vector<int> seen(hosts.count(), 0);
  for (Block& block : blocks) block.index = seen[block.host]++;
  return blocks;
}

BlockSum::BlockSum(const Request& request, const Hosts& hosts)
    : hosts_(hosts),
      blocks_(blocksOf(hosts)),
      narrowed_(request.narrowed && (request.op != ReduceOp::Avg || areEqual(blocks_))),
      inner_(innerOf(request, narrowed_)),
      accumulate_(isShort(request.dtype) ? DType::Float32 : request.dtype),
      widening_(isShort(request.dtype) ? 2 : 1),
      resultWidening_(request.widened ? 2 : 1),
      cast_(isShort(request.dtype) ? &wireCast(request.dtype) : nullptr),
      divisor_(narrowed_ ? static_cast<double>(blocks_.size()) : hosts.size()),
      of_(hosts.count()),
      even_(true) {
  // Each operand was multiplied when its block was summed.
  const bool scaled = request.op == ReduceOp::PreMulSum;
  combine_ = reduceFunction(accumulate_, scaled ? ReduceOp::Sum : combining(request.op));
  finish_ = reduceFunction(accumulate_, scaled ? ReduceOp::Sum : request.op);
  plain_.assign(of_.size(), !scaled);
  for (const Block& block : blocks_) {
    const std::size_t host = block.host;
    of_[host].push_back(block);
    if (block.count > 1) plain_[host] = false;
    // Only the last block may be shorter than the others. Elsewhere the tree has another form.
    const bool last = block.first + block.count == hosts.size();
    const int usual = blocks_[0].count;
    even_ = even_ && (block.count == usual || (last && block.count < usual));
  }
  even_ = even_ && leftOf(2 * blocks_[0].count) == blocks_[0].count;
  const auto& local = hosts.local();
  for (const Block& block : of_[hosts.here()]) {
    reducers_.emplace_back(inner_, block.count);
    places_.push_back(
        static_cast<int>(std::find(local.begin(), local.end(), block.first) - local.begin()));
  }
  root_ = plan(0, hosts.size());
  temporaries_.resize((parts_.size() + 1) * kStep);
  sources_.resize(blocks_.size());
}

int BlockSum::plan(int first, int count) {
  const auto block = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& b) {
    return b.first == first && b.count == count;
  });
  Part part{first, count, -1, -1, -1};
  if (block != blocks_.end()) {
    part.block = static_cast<int>(block - blocks_.begin());
  } else {
    const int left = leftOf(count);
    part.left = plan(first, left);
    part.right = plan(first + left, count - left);
  }
  parts_.push_back(part);
  return static_cast<int>(parts_.size()) - 1;
}

void BlockSum::partial(int index, const std::vector<const std::uint8_t*>& operands,
                       std::size_t bytes, std::uint8_t* out) {
  if (bytes == 0) return;
  const std::size_t i = index;
  const Block& block = of_[hosts_.here()][i];
  const std::size_t first = places_[i];
  if (plain(hosts_.here())) {
    if (out != operands[first]) std::memcpy(out, operands[first], bytes);
    return;
  }
  for (int j = 0; j < block.count; ++j) {
    reducers_[i].source(j, operands[first + j]);
  }
  reducers_[i].run(out, bytes);
}

/// Returns where bytes [at, at + bytes) of a part lie, in the accumulate dtype.
const std::uint8_t* BlockSum::evaluate(int index, std::size_t at, std::size_t bytes, bool last) {
  const Part& part = parts_[index];
  std::uint8_t* out = temporary(index);
  if (part.block >= 0) {
    const std::size_t block = part.block;
    const std::uint8_t* partial = (*partials_)[block];
    if (cast_ == nullptr || !isShortOf(blocks_[block].host)) return partial + at;
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

void BlockSum::total(const std::vector<const std::uint8_t*>& partials, std::size_t bytes,
                     std::uint8_t* out) {
  partials_ = &partials;
  const std::size_t all = bytes * widening_;
  for (std::size_t at = 0; at < all; at += kStep) {
    const std::size_t length = std::min(kStep, all - at);
    const std::uint8_t* sum = nullptr;
    if (even_) {
      for (std::size_t i = 0; i < blocks_.size(); ++i) {
        const bool narrow = cast_ != nullptr && isShortOf(blocks_[i].host);
        std::uint8_t* wide = temporary(static_cast<int>(i));
        if (narrow) {
          cast_->widen(wide, partials[i] + at / widening_, length / sizeof(float));
        }
        sources_[i] = narrow ? wide : partials[i] + at;
      }
      ReduceArgs args{};
      args.dst = temporary(static_cast<int>(parts_.size()));
      args.srcs = sources_.data();
      args.k = static_cast<int>(sources_.size());
      args.count = length / elementSize(accumulate_);
      args.divisor = divisor_;
      if (widening_ == resultWidening_) args.dst = out + at;
      finish_(args);
      sum = static_cast<const std::uint8_t*>(args.dst);
    } else {
      sum = evaluate(root_, at, length, true);
    }
    if (widening_ != resultWidening_) {
      cast_->narrow(out + at / widening_, sum, length / sizeof(float));
    } else if (sum != out + at) {
      std::memcpy(out + at, sum, length);
    }
  }
}

}  // namespace fastcoll
