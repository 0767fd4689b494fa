#include "trace/ring.hpp"

#include <bit>
#include <cstddef>
#include <cstring>

namespace fastcoll::trace {
namespace {

static_assert(sizeof(Record) % 8 == 0 && alignof(Record) == 8);

// A holder writes only a few words. If it takes longer, its thread has lost its core.
constexpr int kTries = 200;

#define FASTCOLL_WORD(field) (offsetof(Record, field) / 8)

}  // namespace

class Ring::Claim {
 public:
  /// `fresh`: the slot may have an earlier record.
  Claim(const Ring& ring, RecordId id, bool fresh = false) : slot_(ring.slotOf(id)), id_(id) {
    for (int i = 0; id != 0 && i < kTries && !held_; ++i) {
      std::uint64_t version = slot_.version.load(std::memory_order_relaxed);
      if (fresh ? version / 2 > id : version / 2 != id) return;  // overtaken by a whole lap
      if (version % 2 == 1) continue;
      held_ = slot_.version.compare_exchange_weak(version, 2 * id + 1, std::memory_order_acquire,
                                                  std::memory_order_relaxed);
    }
  }
  ~Claim() {
    if (held_) slot_.version.store(2 * id_, std::memory_order_release);
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  explicit operator bool() const { return held_; }
  // Release: a reader of the new word then also reads the odd version.
  template <typename T>
  void set(std::size_t word, T value) {
    slot_.words[word].store(std::bit_cast<std::uint64_t>(value), std::memory_order_release);
  }
  std::uint64_t get(std::size_t word) const {
    return slot_.words[word].load(std::memory_order_relaxed);
  }

 private:
  Slot& slot_;
  const RecordId id_;
  bool held_ = false;
};

Ring::Ring(std::size_t size)
    : size_(size),
      mask_(std::bit_ceil(size) - 1),
      memory_(mask_ + 1, sizeof(Slot)),
      slots_(static_cast<Slot*>(memory_.slots())),  // of zeros: version 0
      next_(memory_.header().records) {
  memory_.header().kept = size;
}

RecordId Ring::add(const Record& draft, std::uint64_t seq, bool starts) {
  const RecordId id = next_.fetch_add(1, std::memory_order_relaxed) + 1;
  Claim slot(*this, id, true);
  if (!slot) return 0;
  const std::size_t used = FASTCOLL_WORD(shapes.words) + draft.shapes.used;
  const char* const from = reinterpret_cast<const char*>(&draft);
  for (std::size_t i = 0; i < used; ++i) {
    std::uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    slot.set(i, word);
  }
  slot.set(FASTCOLL_WORD(id), id);
  slot.set(FASTCOLL_WORD(seq), seq);
  if (starts) {
    slot.set(FASTCOLL_WORD(state), static_cast<std::uint64_t>(State::Started));
    slot.set(FASTCOLL_WORD(started), draft.created);
  }
  // Prefetch the next record's lines: they have left the first-level cache since their last write.
  const char* const next = reinterpret_cast<const char*>(&slotOf(id + 1));
  for (int line = 0; line < 3; ++line) __builtin_prefetch(next + 64 * line, 1);
  return id;
}

void Ring::start(RecordId id, std::int64_t now) {
  if (Claim slot(*this, id); slot) {
    // Another thread may record the end before this one records the start.
    const auto scheduled = static_cast<std::uint64_t>(State::Scheduled);
    if (slot.get(FASTCOLL_WORD(state)) == scheduled) {
      slot.set(FASTCOLL_WORD(state), static_cast<std::uint64_t>(State::Started));
    }
    slot.set(FASTCOLL_WORD(started), now);
  }
}

void Ring::end(RecordId id, State state, std::int64_t now, Digests digests) {
  if (Claim slot(*this, id); slot && slot.get(FASTCOLL_WORD(ended)) == 0) {
    slot.set(FASTCOLL_WORD(state), static_cast<std::uint64_t>(state));
    slot.set(FASTCOLL_WORD(ended), now);
    if (digests.input == 0 && digests.output == 0) return;
    slot.set(FASTCOLL_WORD(digests.input), digests.input);
    slot.set(FASTCOLL_WORD(digests.output), digests.output);
  }
}

void Ring::setMessage(RecordId id, std::int64_t peer, std::uint64_t seq) {
  if (Claim slot(*this, id); slot) {
    slot.set(FASTCOLL_WORD(peer), peer);
    slot.set(FASTCOLL_WORD(seq), seq);
  }
}

std::uint32_t Ring::groupOf(RecordId id) const {
  Claim slot(*this, id);
  if (!slot) return 0;
  Record record;
  const std::uint64_t word = slot.get(FASTCOLL_WORD(group));
  static_assert(offsetof(Record, group) % 8 == 0);
  std::memcpy(&record.group, &word, sizeof record.group);
  return record.group;
}

std::vector<Record> Ring::read() const {
  std::vector<Record> records;
  const RecordId last = this->last();
  const RecordId first = last > size_ ? last - size_ + 1 : 1;
  records.reserve(last - first + 1);
  for (RecordId id = first; id <= last; ++id) {
    Record record;
    if (read(id, record)) records.push_back(record);
  }
  return records;
}

bool Ring::read(RecordId id, Record& record) const {
  const Slot& slot = slotOf(id);
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t version = slot.version.load(std::memory_order_acquire);
    if (version / 2 != id) return false;  // not written, or overwritten since
    if (version % 2 == 1) continue;
    char* const to = reinterpret_cast<char*>(&record);
    for (std::size_t word = 0; word < kWords; ++word) {
      const std::uint64_t value = slot.words[word].load(std::memory_order_acquire);
      std::memcpy(to + 8 * word, &value, 8);
    }
    if (slot.version.load(std::memory_order_relaxed) == version) return true;
  }
  return false;
}

std::string Ring::copy() const {
  std::string slots((mask_ + 1) * sizeof(Slot), '\0');
  for (const Record& record : read()) {
    char* const to = slots.data() + (record.id & mask_) * sizeof(Slot);
    const std::uint64_t version = 2 * record.id;
    std::memcpy(to, &version, sizeof version);
    std::memcpy(to + offsetof(Slot, words), &record, sizeof record);
  }
  return slots;
}

}  // namespace fastcoll::trace
