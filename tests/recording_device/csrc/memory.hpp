// Accesses to device memory, and the violations among them.
//
// The model is torch's caching allocator: a block belongs to the stream that was current when it
// was made, and after its free the stream's next work may use it at once. So earlier work of its
// stream may still run on new memory. Work of any other stream must be ordered before the free on
// that stream, unless recordStream has reported the use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "clock.hpp"
#include "footprint.hpp"

namespace recording {

struct Access {
  Footprint footprint;
  bool write;
};

// One side of a violation, or one access in the log.
struct Touch {
  std::string what;
  std::string stream;
  uintptr_t address = 0;
  size_t bytes = 0;
  bool write = false;
};

struct Violation {
  std::string kind;  // "race", "freed early", "not device memory", "unknown stream"
  std::string text;
  Touch first;
  Touch second;
};

class Memory {
 public:
  // `clock` is the stream's clock at this point.
  void allocate(uintptr_t address, size_t bytes, StreamIndex stream, const Clock& clock);
  // The stream that the block belongs to; -1 if there is no block.
  StreamIndex streamOf(uintptr_t address) const;
  size_t bytesOf(uintptr_t address) const;
  // `clock` is the clock of the block's stream, merged with that of the freeing thread.
  void free(uintptr_t address, const Clock& clock);
  void forget(uintptr_t address);
  void recordStream(uintptr_t address, StreamIndex stream);
  void access(const Access& access, StreamIndex stream, const Clock& clock,
              const std::string& what);

  void report(Violation violation);
  const std::vector<Violation>& violations() const { return violations_; }
  void clear();

 private:
  struct Past {
    Footprint footprint;
    bool write;
    StreamIndex stream;
    uint64_t time;
    std::string what;
  };
  struct Block {
    size_t bytes;
    StreamIndex stream;
    std::set<StreamIndex> told;  // reported by recordStream
    std::vector<Past> past;
  };
  using Blocks = std::map<uintptr_t, Block>;

  Blocks::const_iterator find(uintptr_t address) const;
  static Touch touch(const Past& past, const Footprint& other);

  Blocks blocks_;
  std::vector<Violation> violations_;
};

}  // namespace recording
