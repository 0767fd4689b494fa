// How the ranks of a group come together through a store that may still hold what an earlier life
// of the group left there: torchrun uses its store again after a restart, and a process may create
// a group anew under the same name.
//
//   <folder>/r/<rank>            the rank's record; it holds a nonce, drawn now
//   <folder>/roster              of rank 0: all records, in rank order
//   <folder>/<id>/<round>/<rank> what a rank says in a round; the id is the roster's hash
//   <folder>/<id>/<round>        of rank 0: what all have said, in rank order
//
// A rank believes a roster that has its own record. So rank 0 of now made it; of another rank it
// may have an old record, for which nobody speaks in a round. Rank 0 then waits for that rank's new
// record, and publishes another roster. A key that names an id is never stale.
//
// Rank 0 reads a key of every rank, the others read keys of rank 0: n reads a round, not n^2.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "../base/error.hpp"
#include "../base/store.hpp"

namespace fastcoll {

/// Between two looks into the store: 50 us at first (everybody is about to arrive), 10 ms in the
/// end (somebody is late).
void pause(int& looks);

class Roster {
 public:
  using Texts = std::vector<std::string>;
  /// Called between two looks into the store; ends the wait by an exception.
  using OnLook = std::function<void()>;
  /// Whether a record is not one of an earlier life, as far as can be known. May throw, if it is
  /// none of fastcoll's; the other ranks then get the roster with it, too.
  using Believes = std::function<bool(int rank, const std::string& record)>;

  /// `folder`: of the group's keys. `record`: this rank's.
  Roster(KeyValueStore& store, std::string folder, int rank, int size, std::string record);

  /// Announces this rank; waits for nobody.
  void publish();
  /// A rank's record as the store has it now, also this rank's; false: none.
  bool read(int rank, std::string& record);
  /// Waits for a roster other than the one that was gathered before.
  const Texts& gather(const Believes& believes, const OnLook& onLook);
  /// Of the roster; "" before there is one, when the folder must be of this life of the group.
  const std::string& id() const { return id_; }
  /// Whether the store has another roster, or will have: for rank 0 a record has changed.
  bool changed(const Believes& believes);

  /// Says something in a round, and waits for what all say. Nothing: `over` became true, which is
  /// asked between looks.
  std::optional<Texts> exchange(const std::string& round, const std::string& text,
                                const OnLook& onLook, const std::function<bool()>& over = {});
  /// Says something in a round; waits for nobody.
  void say(const std::string& round, const std::string& text);
  /// What a rank has said in a round; false: nothing yet.
  bool said(const std::string& round, int rank, std::string& text);
  /// The ranks that have said nothing in a round.
  std::vector<int> silent(const std::string& round);
  /// Deletes what this rank has set, as far as the store can. An exchange that has ended deletes
  /// what this rank set for the one before, which all have read by then.
  void erase() noexcept;
  /// For what the store holds and no rank of this group can have written.
  Error foreign(const std::string& what) const;

 private:
  std::string recordKey(int rank) const;
  std::string roundKey(const std::string& round) const;
  std::string roundKey(const std::string& round, int rank) const;
  void put(Texts& keys, const std::string& key, const std::string& value);
  void take(Texts records, const std::string& encoded);
  bool lookForRoster(std::string& encoded, Texts& records);
  void eraseAll(Texts& keys) noexcept;

  KeyValueStore& store_;
  const std::string folder_;
  const int rank_;
  const int size_;
  const std::string record_;
  Texts records_;
  std::string encoded_;  // the roster, as the store has it
  std::string id_;
  Texts keys_;      // that this rank has set
  Texts exchange_;  // and those of the exchange under way, or before
};

}  // namespace fastcoll
