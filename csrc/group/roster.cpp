#include "group/roster.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "base/hash.hpp"

namespace fastcoll {
namespace {

/// The texts, each after its length in 4 bytes.
std::string encode(const Roster::Texts& texts) {
  std::string all;
  for (const std::string& text : texts) {
    const auto length = static_cast<std::uint32_t>(text.size());
    all.append(reinterpret_cast<const char*>(&length), sizeof length);
    all += text;
  }
  return all;
}

/// False unless `all` holds exactly `count` texts.
bool decode(const std::string& all, int count, Roster::Texts& texts) {
  texts.clear();
  std::size_t at = 0;
  for (int i = 0; i < count; ++i) {
    std::uint32_t length = 0;
    if (all.size() - at < sizeof length) return false;
    std::memcpy(&length, all.data() + at, sizeof length);
    at += sizeof length;
    if (all.size() - at < length) return false;
    texts.push_back(all.substr(at, length));
    at += length;
  }
  return at == all.size();
}

}  // namespace

void pause(int& polls) {
  const int micros = std::min(10000, 50 << std::min(polls++, 8));
  std::this_thread::sleep_for(std::chrono::microseconds(micros));
}

Roster::Roster(KeyValueStore& store, std::string folder, int rank, int size, std::string record)
    : store_(store),
      folder_(std::move(folder)),
      rank_(rank),
      size_(size),
      record_(std::move(record)) {}

std::string Roster::recordKey(int rank) const {
  return concat(folder_, "/r/", rank);
}
std::string Roster::roundKey(const std::string& round) const {
  return concat(folder_, id_.empty() ? "" : "/", id_, "/", round);
}
std::string Roster::roundKey(const std::string& round, int rank) const {
  return concat(roundKey(round), "/", rank);
}

void Roster::put(Keys& keys, const std::string& key, const std::string& value) {
  store_.set(key, value);
  keys.insert(key);
}

Error Roster::foreign(const std::string& what) const {
  return Error(ErrorKind::Store, "the store holds an invalid entry of fastcoll: ", what, kOwnStore);
}

void Roster::publish() {
  put(keys_, recordKey(rank_), record_);
}

bool Roster::read(int rank, std::string& record) {
  return store_.tryGet(recordKey(rank), record);
}

void Roster::take(Texts records, const std::string& encoded) {
  records_ = std::move(records);
  encoded_ = encoded;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx",
                static_cast<unsigned long long>(fnv(encoded.data(), encoded.size())));
  id_ = digits;
}

/// For ranks other than 0: a roster that holds this rank's own record. An earlier instance of the
/// group may have had more ranks.
bool Roster::readRoster(std::string& encoded, Texts& records) {
  return store_.tryGet(concat(folder_, "/roster"), encoded) && decode(encoded, size_, records) &&
         records[rank_] == record_;
}

const Roster::Texts& Roster::gather(const IsCurrent& isCurrent, const OnPoll& onPoll) {
  Texts records(size_);
  records[rank_] = record_;
  std::vector<int> missing(size_ - 1);  // on rank 0: whose records it has not read
  std::iota(missing.begin(), missing.end(), 1);
  const auto publishRoster = [&] {
    const std::string encoded = encode(records);
    take(std::move(records), encoded);
    put(keys_, concat(folder_, "/roster"), encoded_);
  };
  for (int polls = 0;;) {
    if (rank_ == 0) {
      try {
        std::erase_if(missing, [&](int rank) {
          return read(rank, records[rank]) && isCurrent(rank, records[rank]);
        });
      } catch (const Error&) {
        publishRoster();
        throw;
      }
      if (missing.empty()) {
        publishRoster();
        return records_;
      }
    } else if (std::string encoded; readRoster(encoded, records) && encoded != encoded_) {
      take(std::move(records), encoded);
      return records_;
    }
    onPoll();
    pause(polls);
  }
}

bool Roster::changed(const IsCurrent& isCurrent) {
  if (id_.empty()) return false;
  if (rank_ != 0) {
    std::string encoded;
    Texts records;
    return readRoster(encoded, records) && encoded != encoded_;
  }
  for (int rank = 1; rank < size_; ++rank) {
    std::string now;
    if (!read(rank, now) || now == records_[rank]) continue;
    if (isCurrent(rank, now)) return true;
  }
  return false;
}

void Roster::post(const std::string& round, const std::string& text) {
  put(keys_, roundKey(round, rank_), text);
}

bool Roster::get(const std::string& round, int rank, std::string& text) {
  return store_.tryGet(roundKey(round, rank), text);
}

std::optional<Roster::Texts> Roster::exchange(const std::string& round, const std::string& text,
                                              const OnPoll& onPoll,
                                              const std::function<bool()>& over) {
  Texts texts(size_);
  texts[0] = text;
  int next = 1;  // on rank 0: the first one whose text it has not read
  Keys before = std::exchange(exchange_, {});
  put(exchange_, roundKey(round, rank_), text);
  for (int polls = 0;;) {
    if (rank_ == 0) {
      while (next < size_ && get(round, next, texts[next])) ++next;
      if (next == size_) {
        put(exchange_, roundKey(round), encode(texts));
        eraseAll(before);
        return texts;
      }
    } else if (std::string encoded; store_.tryGet(roundKey(round), encoded)) {
      if (!decode(encoded, size_, texts))
        throw foreign(concat("the entries of round '", round, "'"));
      eraseAll(before);
      return texts;
    }
    onPoll();
    if (over && over()) {
      keys_.merge(before);
      return std::nullopt;
    }
    pause(polls);
  }
}

void Roster::erase(const std::string& round) noexcept {
  Keys posted;
  posted.insert(keys_.extract(roundKey(round, rank_)));
  eraseAll(posted);
}

std::vector<int> Roster::missing(const std::string& round) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !store_.has(roundKey(round, rank))) ranks.push_back(rank);
  }
  return ranks;
}

void Roster::eraseAll(Keys& keys) noexcept {
  for (const std::string& key : keys) store_.erase(key);
  keys.clear();
}

void Roster::erase() noexcept {
  eraseAll(exchange_);
  eraseAll(keys_);
}

}  // namespace fastcoll
