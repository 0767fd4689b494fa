// The user's settings: the rows of fastcoll/settings.def as a struct. A variable that is set
// overrides the field of fastcoll.Options with the same meaning.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fastcoll {

enum class SharedMemoryChoice : std::uint32_t { Auto, Off, Require };
enum class StoresChoice { Auto, Plain, Streaming };
enum class DigestsOf { Nothing, Sums, All };

/// One row of the table.
struct Setting {
  const char* variable;
  bool ofGroup;  // then also a field of fastcoll.Options
  std::int64_t least = 0;
  std::int64_t most = 1;           // for a text: characters
  std::vector<std::string> words;  // for a choice

  /// "ring_bytes" of FASTCOLL_RING_BYTES.
  std::string option() const;
  /// Sets `value` from the text. Throws Error(Value), whose text begins with `given`.
  void parse(const std::string& given, const std::string& text, std::string& value) const;
  void parse(const std::string& given, const std::string& text, std::int64_t& value) const;
  void parse(const std::string& given, const std::string& text, bool& value) const;
};

struct Settings {
#define TEXT(scope, field, variable, group, fallback, most, meaning) std::string field = fallback;
#define CHOICE(scope, field, variable, group, fallback, words, meaning) \
  std::string field = fallback;
#define INTEGER(scope, field, variable, group, fallback, least, most, meaning) \
  std::int64_t field = fallback;
#define SWITCH(scope, field, variable, group, fallback, meaning) bool field = fallback;
#include "../../fastcoll/settings.def"

  /// Calls visit(setting, member pointer) for each row.
  template <typename Visit>
  static void each(Visit&& visit) {
#define FASTCOLL_PROCESS false
#define FASTCOLL_GROUP true
#define FASTCOLL_WORDS(...) {__VA_ARGS__}
#define TEXT(scope, field, variable, group, fallback, most, meaning) \
  visit(Setting{variable, FASTCOLL_##scope, 0, most, {}}, &Settings::field);
#define CHOICE(scope, field, variable, group, fallback, words, meaning) \
  visit(Setting{variable, FASTCOLL_##scope, 0, 0, FASTCOLL_WORDS words}, &Settings::field);
#define INTEGER(scope, field, variable, group, fallback, least, most, meaning) \
  visit(Setting{variable, FASTCOLL_##scope, least, most, {}}, &Settings::field);
#define SWITCH(scope, field, variable, group, fallback, meaning) \
  visit(Setting{variable, FASTCOLL_##scope, 0, 1, {}}, &Settings::field);
#include "../../fastcoll/settings.def"
#undef FASTCOLL_PROCESS
#undef FASTCOLL_GROUP
#undef FASTCOLL_WORDS
  }

  /// These settings, overridden by the present environment. Throws Error(Value) that names the
  /// variable whose value is not allowed. If FASTCOLL_ERROR_HANDLING or FASTCOLL_HEARTBEAT_SECONDS
  /// is unset, torch's variables for NCCL decide.
  Settings withEnvironment() const;

  SharedMemoryChoice sharedMemoryChoice() const;
  StoresChoice storesChoice() const;
  DigestsOf digestsOf() const;
};

}  // namespace fastcoll
