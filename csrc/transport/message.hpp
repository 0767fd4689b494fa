// A message: the caller's bytes, in one piece or in many. Coalesced collectives treat a list of
// tensors as one message, so that they need no flat copy: segments are gathered straight from the
// tensors into the slots of shared memory and scattered straight back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "copy.hpp"

namespace fastcoll {

struct Span {
  std::uint8_t* data = nullptr;
  std::size_t bytes = 0;
};

class Message {
 public:
  Message() = default;
  Message(void* data, std::size_t bytes) : first_{static_cast<std::uint8_t*>(data), bytes} {
    bytes_ = bytes;
  }

  void append(void* data, std::size_t bytes) {
    if (bytes == 0) return;
    if (bytes_ == 0) {
      first_ = {static_cast<std::uint8_t*>(data), bytes};
    } else {
      more_.push_back({static_cast<std::uint8_t*>(data), bytes});
    }
    bytes_ += bytes;
  }

  std::size_t bytes() const { return bytes_; }
  /// The pieces, none of them empty.
  std::vector<Span> spans() const {
    if (bytes_ == 0) return {};
    std::vector<Span> all{first_};
    all.insert(all.end(), more_.begin(), more_.end());
    return all;
  }

  /// The address of [offset, offset + length) if it lies in one piece, else nullptr.
  std::uint8_t* contiguous(std::size_t offset, std::size_t length) const {
    if (offset + length <= first_.bytes) return first_.data + offset;
    std::size_t start = first_.bytes;
    for (const Span& span : more_) {
      if (offset < start + span.bytes) {
        return offset >= start && offset + length <= start + span.bytes
                   ? span.data + (offset - start)
                   : nullptr;
      }
      start += span.bytes;
    }
    return nullptr;
  }

  /// Copies [offset, offset + length) of the message to `to`.
  void read(std::size_t offset, std::size_t length, void* to) const {
    auto* out = static_cast<std::uint8_t*>(to);
    visit(offset, length, [&out](std::uint8_t* data, std::size_t bytes) {
      std::memcpy(out, data, bytes);
      out += bytes;
    });
  }

  /// Copies `length` bytes at `from` into the message at `offset`; `streaming` past the caches.
  void write(std::size_t offset, std::size_t length, const void* from,
             bool streaming = false) const {
    const auto* in = static_cast<const std::uint8_t*>(from);
    visit(offset, length, [&in, streaming](std::uint8_t* data, std::size_t bytes) {
      // A tensor gathered in place is already where it should be.
      if (data != in) streaming ? copyStreaming(data, in, bytes) : copyPlain(data, in, bytes);
      in += bytes;
    });
  }

  /// Copies this whole message over `target`, which has the same number of bytes.
  void copyTo(const Message& target, bool streaming = false) const {
    std::size_t offset = 0;
    visit(0, bytes_, [&](std::uint8_t* data, std::size_t bytes) {
      target.write(offset, bytes, data, streaming);
      offset += bytes;
    });
  }

 private:
  template <typename Use>
  void visit(std::size_t offset, std::size_t length, Use use) const {
    if (length == 0) return;
    std::size_t start = 0;
    auto one = [&](const Span& span) {
      if (length > 0 && offset < start + span.bytes) {
        const std::size_t skip = offset - start;
        const std::size_t take = std::min(length, span.bytes - skip);
        use(span.data + skip, take);
        offset += take;
        length -= take;
      }
      start += span.bytes;
    };
    one(first_);
    for (const Span& span : more_) {
      if (length == 0) break;
      one(span);
    }
  }

  Span first_;
  std::vector<Span> more_;
  std::size_t bytes_ = 0;
};

}  // namespace fastcoll
