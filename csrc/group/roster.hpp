// How the ranks of a group find each other in a store. The store may still hold keys of an earlier
// instance of the group: torchrun reuses its store after a restart, and a process may recreate a
// group under the same name.
//
//   <folder>/r/<rank>            the rank's record; it holds a fresh nonce
//   <folder>/roster              by rank 0: all records, in rank order
//   <folder>/<id>/<round>/<rank> a rank's text in a round; the id is the roster's hash
//   <folder>/<id>/<round>        by rank 0: the texts of all ranks, in rank order
//
// A rank accepts a roster that holds its own record. Such a roster was made by the current rank 0.
// It may still hold another rank's stale record; that rank will then not post in the next round.
// Rank 0 waits for that rank's new record, and publishes another roster. A key that names an id is
// never stale.
//
// Rank 0 reads a key of every rank, the others read keys of rank 0: n reads a round, not n^2.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/exported.hpp"
#include "base/store.hpp"

namespace fastcoll {

/// Sleeps between two reads of the store. At first 50 us, when all ranks are about to arrive. In
/// the end 10 ms, when some rank is late.
void pause(int& polls);

class FASTCOLL_EXPORTED Roster {
 public:
  using Texts = std::vector<std::string>;
  /// Called between two reads of the store; ends the wait by an exception.
  using OnPoll = std::function<void()>;
  /// Whether a record is of this instance of the group, as far as is known. May throw for an
  /// invalid record. The roster is then published with that record, so the other ranks read it,
  /// too.
  using IsCurrent = std::function<bool(int rank, const std::string& record)>;

  /// `folder`: prefix of the group's keys. `record`: this rank's.
  Roster(KeyValueStore& store, std::string folder, int rank, int size, std::string record);

  /// Publishes this rank's record; does not wait.
  void publish();
  /// A rank's current record in the store, also this rank's; false if there is none.
  bool read(int rank, std::string& record);
  /// Waits for a roster other than the one that was gathered before.
  const Texts& gather(const IsCurrent& isCurrent, const OnPoll& onPoll);
  /// The roster's id; "" before there is one. Then the folder must be unique to this instance.
  const std::string& id() const { return id_; }
  /// Whether the store has another roster, or will have. On rank 0: whether a record has changed.
  bool changed(const IsCurrent& isCurrent);

  /// Posts a text in a round, and waits for the texts of all ranks. nullopt if `over`, which is
  /// called between reads, became true.
  std::optional<Texts> exchange(const std::string& round, const std::string& text,
                                const OnPoll& onPoll, const std::function<bool()>& over = {});
  /// Posts a text in a round; does not wait.
  void post(const std::string& round, const std::string& text);
  /// A rank's text in a round; false if there is none yet.
  bool get(const std::string& round, int rank, std::string& text);
  /// Deletes what this rank has posted in a round, as far as the store can.
  void erase(const std::string& round) noexcept;
  /// The other ranks without a text in a round.
  std::vector<int> missing(const std::string& round);
  /// Deletes this rank's keys, as far as the store can. An exchange that ends deletes this rank's
  /// keys of the exchange before, which all ranks have read by then.
  void erase() noexcept;
  /// The error for a value in the store that no rank of this group can have written.
  Error foreign(const std::string& what) const;

 private:
  std::string recordKey(int rank) const;
  std::string roundKey(const std::string& round) const;
  std::string roundKey(const std::string& round, int rank) const;
  using Keys = std::set<std::string>;
  void put(Keys& keys, const std::string& key, const std::string& value);
  void take(Texts records, const std::string& encoded);
  bool readRoster(std::string& encoded, Texts& records);
  void eraseAll(Keys& keys) noexcept;

  KeyValueStore& store_;
  const std::string folder_;
  const int rank_;
  const int size_;
  const std::string record_;
  Texts records_;
  std::string encoded_;  // the roster, as the store has it
  std::string id_;
  Keys keys_;      // that this rank has set
  Keys exchange_;  // and those of the current or last exchange
};

}  // namespace fastcoll
