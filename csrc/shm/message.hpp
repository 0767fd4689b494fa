// A message: the caller's bytes, in one piece or in many. A coalesced collective treats its list of
// tensors as one message and needs no flat copy. Segments are gathered from the tensors straight
// into the ring, and scattered straight back. With a cast, memory holds float32 and 16 bits travel;
// such a message is never in one piece.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reduce/reduce.hpp"
#include "shm/copy.hpp"
#include "shm/helpers.hpp"

namespace fastcoll {

struct Span {
  std::uint8_t* data = nullptr;
  std::size_t bytes = 0;
};

class Message {
 public:
  Message() = default;
  /// A message of float32 that travels in 16 bits. All sizes and offsets are those on the wire.
  explicit Message(const WireCast& cast) : cast_(&cast) {}
  Message(void* data, std::size_t bytes) : first_{static_cast<std::uint8_t*>(data), bytes} {
    bytes_ = bytes;
  }

  /// Adds `bytes` of memory to the end.
  void append(void* data, std::size_t bytes) {
    if (bytes == 0) return;
    if (cast_ != nullptr) bytes /= kNarrowing;
    if (bytes_ == 0) {
      first_ = {static_cast<std::uint8_t*>(data), bytes};
    } else {
      more_.push_back({{static_cast<std::uint8_t*>(data), bytes}, bytes_});
    }
    bytes_ += bytes;
  }

  std::size_t bytes() const { return bytes_; }
  bool isCast() const { return cast_ != nullptr; }
  /// The pieces, none of them empty. Only for a message without a cast.
  std::vector<Span> spans() const {
    if (bytes_ == 0) return {};
    std::vector<Span> all{first_};
    for (const Placed& placed : more_) all.push_back(placed.span);
    return all;
  }

  /// The address of [offset, offset + length) if it is in one piece, else nullptr.
  std::uint8_t* contiguous(std::size_t offset, std::size_t length) const {
    if (cast_ != nullptr) return nullptr;
    if (offset + length <= first_.bytes) return first_.data + offset;
    if (offset < first_.bytes || offset >= bytes_) return nullptr;
    const Placed& placed = *find(offset);
    const std::size_t within = offset - placed.start;
    return within + length <= placed.span.bytes ? placed.span.data + within : nullptr;
  }

  /// Calls use(offset, data, bytes) for each piece, with its place among the bytes of memory.
  template <typename Use>
  void visitMemory(Use use) const {
    std::size_t offset = 0;
    visit(0, bytes_,
          [&, scale = cast_ != nullptr ? kNarrowing : 1](std::uint8_t* data, std::size_t bytes) {
            use(offset, data, bytes * scale);
            offset += bytes * scale;
          });
  }

  /// Copies [offset, offset + length) of the message to `to`; `streaming`: past the caches.
  void read(std::size_t offset, std::size_t length, void* to, bool streaming = false) const {
    auto* const out = static_cast<std::uint8_t*>(to);
    Helpers::inChunks(length, [=, this](std::size_t begin, std::size_t end) {
      readChunk(offset + begin, end - begin, out + begin, streaming);
    });
  }
  /// Copies `length` bytes at `from` into the message at `offset`; `streaming`: past the caches,
  /// except with a cast.
  void write(std::size_t offset, std::size_t length, const void* from,
             bool streaming = false) const {
    const auto* const in = static_cast<const std::uint8_t*>(from);
    Helpers::inChunks(length, [=, this](std::size_t begin, std::size_t end) {
      writeChunk(offset + begin, end - begin, in + begin, streaming);
    });
  }
  /// Copies this whole message over `target`, which has the same number of bytes. Neither has a
  /// cast.
  void copyTo(const Message& target, bool streaming = false) const {
    std::size_t offset = 0;
    visit(0, bytes_, [&](std::uint8_t* data, std::size_t bytes) {
      target.write(offset, bytes, data, streaming);
      offset += bytes;
    });
  }

 private:
  static constexpr std::size_t kWireElement = 2;
  static constexpr std::size_t kNarrowing = sizeof(float) / kWireElement;

  struct Placed {
    Span span;
    std::size_t start;  // in the message
  };

  void readChunk(std::size_t offset, std::size_t length, std::uint8_t* out, bool streaming) const {
    visit(offset, length, [&out, streaming, this](std::uint8_t* data, std::size_t bytes) {
      if (cast_ == nullptr) {
        streaming ? copyStreaming(out, data, bytes) : copyPlain(out, data, bytes);
      } else if (streaming) {
        narrowStreaming(out, data, bytes);
      } else {
        cast_->narrow(out, data, bytes / kWireElement);
      }
      out += bytes;
    });
  }

  void writeChunk(std::size_t offset, std::size_t length, const std::uint8_t* in,
                  bool streaming) const {
    visit(offset, length, [&in, streaming, this](std::uint8_t* data, std::size_t bytes) {
      if (cast_ != nullptr) {
        cast_->widen(data, in, bytes / kWireElement);
      } else if (data != in) {  // a tensor gathered in place is already where it should be
        streaming ? copyStreaming(data, in, bytes) : copyPlain(data, in, bytes);
      }
      in += bytes;
    });
  }

  /// Narrows block by block in the first-level cache, because the kernels have plain stores only.
  void narrowStreaming(std::uint8_t* out, const std::uint8_t* data, std::size_t bytes) const {
    alignas(64) std::array<std::uint8_t, 4096> block;
    for (std::size_t at = 0; at < bytes; at += block.size()) {
      const std::size_t take = std::min(block.size(), bytes - at);
      cast_->narrow(block.data(), data + at * kNarrowing, take / kWireElement);
      copyStreaming(out + at, block.data(), take);
    }
  }

  /// The piece of `more_` that holds byte `offset`. The caller ensures that there is one.
  std::vector<Placed>::const_iterator find(std::size_t offset) const {
    return std::upper_bound(more_.begin(), more_.end(), offset,
                            [](std::size_t at, const Placed& p) { return at < p.start; }) -
           1;
  }

  template <typename Use>
  void visit(std::size_t offset, std::size_t length, Use use) const {
    const std::size_t scale = cast_ != nullptr ? kNarrowing : 1;
    auto one = [&](const Span& span, std::size_t skip) {
      const std::size_t take = std::min(length, span.bytes - skip);
      use(span.data + skip * scale, take);
      offset += take;
      length -= take;
    };
    if (length > 0 && offset < first_.bytes) one(first_, offset);
    if (length == 0) return;
    for (auto placed = find(offset); length > 0; ++placed) {
      one(placed->span, offset - placed->start);
    }
  }

  Span first_;
  std::vector<Placed> more_;
  std::size_t bytes_ = 0;
  const WireCast* cast_ = nullptr;
};

}  // namespace fastcoll
