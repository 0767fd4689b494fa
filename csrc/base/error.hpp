// One exception type for every layer below torch's types: a kind, the call that it is of (its
// site), and a cause. csrc/torch/error.hpp translates the kind into the class that torch users
// catch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace fastcoll {

enum class ErrorKind {
  Value,    // the caller's arguments: ValueError
  Type,     // the caller's types: TypeError
  Backend,  // a run-time fault of the group: torch.distributed.DistBackendError
  Timeout,  // a deadline passed: torch.distributed.DistBackendError with the word "timed out"
  Store,    // rendezvous data are bad or missing: torch.distributed.DistStoreError
  Network,  // the store or a host cannot be reached: torch.distributed.DistNetworkError
};

/// The fault of a group, as its ranks tell it to each other.
struct Fault {
  ErrorKind kind = ErrorKind::Backend;
  std::string text;
  std::int64_t publishedAt = 0;  // in the store: milliseconds since 1970, by its writer's clock
};

/// The call that an error is of, as the head of its text: "fastcoll.all_reduce [group 'g', rank
/// 3/8, seq 17]: ". Empty: the error is of no call yet.
struct ErrorSite {
  std::string head;
};

/// Appends a part of a text: strings and characters as they are, integers in decimal, anything else
/// by its operator<<. A stream is used only for the last, because streams take most of a file's
/// compile time.
template <typename Part>
void appendTo(std::string& text, const Part& part) {
  if constexpr (std::is_same_v<Part, char>) {
    text += part;
  } else if constexpr (std::is_same_v<Part, ErrorSite>) {
    text += part.head;
  } else if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    text += std::string_view(part);
  } else if constexpr (std::is_integral_v<Part>) {
    text += std::to_string(part);
  } else {
    std::ostringstream out;
    out << part;
    text += out.str();
  }
}

/// Joins its arguments into one text.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (appendTo(text, parts), ...);
  return text;
}

/// Lists text(item) of each item; leaves out those whose text is empty.
template <typename Items, typename Text = std::identity>
std::string listOf(const Items& items, Text text = {}, const char* between = ", ") {
  std::string all;
  for (const auto& item : items) {
    const std::string one = concat(text(item));
    if (!one.empty()) all += concat(all.empty() ? "" : between, one);
  }
  return all;
}

/// The parts are joined into its cause.
class Error : public std::runtime_error {
 public:
  template <typename... Parts>
  explicit Error(ErrorKind kind, const Parts&... parts) : Error(kind, ErrorSite{}, parts...) {}
  template <typename... Parts>
  Error(ErrorKind kind, const ErrorSite& site, const Parts&... parts)
      : std::runtime_error(concat(site, parts...)), kind_(kind), causeAt_(site.head.size()) {}
  ErrorKind kind() const { return kind_; }
  bool hasSite() const { return causeAt_ != 0; }
  ErrorSite site() const { return {std::string(what(), causeAt_)}; }
  /// The text without the site, for ranks that run another call.
  const char* cause() const { return what() + causeAt_; }

 private:
  ErrorKind kind_;
  std::size_t causeAt_;
};

/// The site of a call of a group. A call without a sequence number has no seq. Group: any type with
/// a name, a rank and a size.
template <typename Group>
ErrorSite errorSite(const char* call, const Group& group,
                    std::optional<std::uint64_t> seq = std::nullopt) {
  const std::string number = seq ? concat(", seq ", *seq) : "";
  return {concat("fastcoll.", call, " [group '", group.name, "', rank ", group.rank, "/",
                 group.size, number, "]: ")};
}

// Remedies that several layers share: the end of an error's text.
inline constexpr std::string_view kReadLog = ". Read the end of its log.";
inline constexpr std::string_view kFindDelay =
    ". Find out what delays it, or raise the group's timeout.";
inline constexpr std::string_view kSameCalls =
    ". All ranks must make the same calls before they exit.";
inline constexpr std::string_view kInitAgain = ". Initialize it again to use it again.";
inline constexpr std::string_view kOwnStore =
    ". Give each job its own store prefix, and install the same version of fastcoll for all ranks.";
inline constexpr std::string_view kMoreThreads = ". Raise the limit on processes (ulimit -u).";
inline constexpr std::string_view kReportThis = ". Please report this.";

/// The text without its full stop, so that the sentence can go on.
inline std::string withoutFullStop(std::string text) {
  if (!text.empty() && text.back() == '.') text.pop_back();
  return text;
}

/// The error of a process that was forked from the one that made the group.
inline constexpr const char* kForked =
    "this process is a fork of the one that made the group. Create process groups after the fork, "
    "or use the spawn or forkserver start method.";

}  // namespace fastcoll
