#include "memory.hpp"

#include <iterator>
#include <sstream>
#include <utility>

namespace recording {
namespace {

const char* const kAllocate = "allocation";

std::string describe(const Touch& touch) {
  std::ostringstream text;
  text << touch.what << " (" << (touch.write ? "write" : "read") << " of " << touch.bytes
       << " bytes at 0x" << std::hex << touch.address << std::dec << " on " << touch.stream << ")";
  return text.str();
}

}  // namespace

Memory::Blocks::const_iterator Memory::find(uintptr_t address) const {
  auto block = blocks_.upper_bound(address);
  if (block == blocks_.begin()) return blocks_.end();
  --block;
  return address < block->first + block->second.bytes ? block : blocks_.end();
}

Touch Memory::touch(const Past& past, const Footprint& other) {
  const Range both = past.footprint.common(other);
  return {past.what, nameOf(past.stream), both.begin, both.end - both.begin, past.write};
}

void Memory::allocate(uintptr_t address, size_t bytes, StreamIndex stream, const Clock& clock) {
  Block block{bytes, stream, {}, {}};
  // Any earlier work of this stream may still use the memory from a previous allocation.
  block.past.push_back(
      {Footprint(address, address + bytes), true, stream, clock[stream], kAllocate});
  blocks_[address] = std::move(block);
}

StreamIndex Memory::streamOf(uintptr_t address) const {
  const auto block = find(address);
  return block == blocks_.end() ? -1 : block->second.stream;
}

size_t Memory::bytesOf(uintptr_t address) const {
  const auto block = find(address);
  return block == blocks_.end() ? 0 : block->second.bytes;
}

void Memory::free(uintptr_t address, const Clock& clock) {
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return;
  const Block& block = found->second;
  const Footprint whole(address, address + block.bytes);
  for (const Past& past : block.past) {
    if (past.stream == block.stream || clock[past.stream] >= past.time) continue;
    if (block.told.count(past.stream) != 0) continue;
    Violation violation{"freed early", "", touch(past, whole),
                        Touch{"free", nameOf(block.stream), address, block.bytes, true}};
    violation.text = describe(violation.first) + " is not done when the block is freed to " +
                     nameOf(block.stream) + ", whose next work may write there: make that stream " +
                     "wait first, or call record_stream";
    report(std::move(violation));
  }
  blocks_.erase(found);
}

void Memory::forget(uintptr_t address) {
  blocks_.erase(address);
}

void Memory::recordStream(uintptr_t address, StreamIndex stream) {
  const auto found = find(address);
  if (found != blocks_.end()) blocks_.at(found->first).told.insert(stream);
}

void Memory::access(const Access& access, StreamIndex stream, const Clock& clock,
                    const std::string& what) {
  if (access.footprint.empty()) return;
  const Range bounds = access.footprint.bounds();
  const auto found = find(bounds.begin);
  if (found == blocks_.end() || bounds.end > found->first + found->second.bytes) {
    Violation violation{"not device memory", "", {}, {}};
    violation.second = {what, nameOf(stream), bounds.begin, bounds.end - bounds.begin,
                        access.write};
    violation.text = describe(violation.second) + " is not inside one living block";
    report(std::move(violation));
    return;
  }
  std::vector<Past>& past = blocks_.at(found->first).past;
  const Past present{access.footprint, access.write, stream, clock[stream], what};
  std::vector<Past> kept;
  kept.reserve(past.size() + 1);
  for (Past& before : past) {
    const bool ordered = before.stream == stream || clock[before.stream] >= before.time;
    if (!ordered && (access.write || before.write) && before.footprint.overlaps(access.footprint)) {
      Violation violation{"race", "", touch(before, access.footprint),
                          touch(present, before.footprint)};
      violation.text =
          describe(violation.first) + " and " + describe(violation.second) + " have no order";
      if (before.what == kAllocate) {
        violation.text +=
            ": earlier work of the stream that the memory was made on may still use it";
      }
      report(std::move(violation));
    }
    // Work ordered after the present access is ordered after these too, and need not be compared
    // with them.
    const bool implied = ordered && (access.write || (before.stream == stream && !before.write)) &&
                         access.footprint.covers(before.footprint);
    if (!implied) kept.push_back(std::move(before));
  }
  kept.push_back(present);
  past = std::move(kept);
}

void Memory::report(Violation violation) {
  violations_.push_back(std::move(violation));
}

void Memory::clear() {
  violations_.clear();
  for (auto& [address, block] : blocks_) block.past.clear();
}

}  // namespace recording
